-- counter.lua: the sliding window counter. windows.lua, which follows it, has the
-- contract.
--
-- `taken` tokens were charged in the window that ends at `ends`, `prev` in the one
-- before. A request of n is admitted if taken + n + prev·overlap ≤ burst, overlap
-- being the part of the window before that a window which ends now covers. It is
-- kept in steps of 1/scale, rounded up, so that all products are exact.
--
-- What it bounds. At a part f of a window overlap ≥ 1 − f, so taken ≤ burst −
-- prev·(1 − f) after a grant. The window that ends then covers taken, and at most
-- all of prev: taken + prev ≤ burst + f·prev, less than 2·burst for prev ≤ burst.
-- And taken ≤ burst: an aligned window never has more.

local NEVER = 9000000000000000
local EXACT = 9007199254740992
local MOST_DEMAND = 4000000000000000 -- so that sums stay exact
local MOST_WINDOW = 31622400000000 -- 366 days
local SLACK_MS = 1000
local floor, max, min = math.floor, math.max, math.min

-- One reading of the clock for the whole script: before Redis 7.2 it moves on.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])

local SHORTEST = 0
local LEASES = false

local function next_end(t, w) return (floor(t / w) + 1) * w end

-- scale returns in how many steps the overlap of prev is told: the products of
-- it with the window, with the burst and with prev are at most 2^53.
local function scale(s, prev)
  return min(s.w, floor(EXACT / s.w), floor(EXACT / max(2 * s.burst, prev)))
end

-- weighed returns what prev counts for at time t, rounded up.
local function weighed(s, t)
  local steps = scale(s, s.prev)
  local overlap = -floor(-min(s.w, s.ends - t) * steps / s.w)
  return -floor(-s.prev * overlap / steps)
end

local function fresh(s, now, used, age)
  s.ends, s.taken, s.prev = next_end(now, s.w), 0, 0
  local began = s.ends - s.w
  if now - age >= began then
    s.taken = max(0, used)
  elseif now - age >= began - s.w then
    s.prev = max(0, used)
  end
end

local function read(s, v, from)
  if #v ~= from + 2 then return false end
  s.ends, s.taken, s.prev = v[from], v[from + 1], v[from + 2]
  return s.taken <= EXACT / 2 and s.prev <= EXACT / 2 and s.ends > s.at and s.ends - s.at <= 2 * MOST_WINDOW
end

local function write(s, v) v[#v + 1], v[#v + 2], v[#v + 3] = s.ends, s.taken, s.prev end

-- fold makes what prev counts for at time t part of this window.
local function fold(s, t) s.taken, s.prev = s.taken + weighed(s, t), 0 end

-- At an earlier time prev would count for more, or in an earlier window for less:
-- then it counts on for what it did. No gift, and nobody waits for the clock.
local function back(s, now)
  local ends = next_end(now, s.w)
  if ends < s.ends then
    fold(s, s.at)
    s.ends = ends
  end
end

local function advance(s, now)
  if now < s.ends then return false end
  s.prev, s.taken, s.ends = s.taken, 0, next_end(s.ends, s.w)
  if now < s.ends then return true end
  s.prev, s.ends = 0, next_end(now, s.w)
  return true
end

-- As with fixed windows the count goes on until the new window ends, or at version
-- 0 the longer one.
local function change(s, now, newer, w)
  if w ~= s.w then
    fold(s, now)
    local ends = next_end(now, w)
    if newer then s.ends = ends else s.ends = max(s.ends, ends) end
  end
end

local function used(s) return s.taken + weighed(s, s.at) end

local function charge(s, n) s.taken = s.taken + n end

local function debit(s, n) s.taken = max(s.taken, min(s.taken + n, 2 * s.burst)) end

-- Of the window before, if the node had nothing of this one: it counts for less.
local function credit(s, n, mine)
  if mine then
    s.taken = s.taken - min(n, s.taken)
  else
    s.prev = s.prev - min(n, s.prev)
  end
end

local function clear(s) s.taken, s.prev = 0, 0 end

-- falls returns the first time from `from` on, in the window that ends at `ends`, at
-- which prev counts for at most `most`.
local function falls(s, ends, from, prev, most)
  if prev <= most then return from end
  local steps = scale(s, prev)
  return max(from, ends - floor(floor(most * steps / prev) * s.w / steps))
end

local function wait_for(s, n)
  local most = s.burst - s.taken - n
  if most >= 0 then return falls(s, s.ends, s.at, s.prev, most) - s.at end
  return falls(s, next_end(s.ends, s.w), s.ends, s.taken, s.burst - n) - s.at
end

local function fill(s)
  if s.taken > 0 then return next_end(s.ends, s.w) - s.at end
  if s.prev > 0 then return s.ends - s.at end
  return 0
end

