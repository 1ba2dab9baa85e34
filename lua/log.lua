-- log.lua: the sliding window log. windows.lua, which follows it, has the contract.
--                                                     O(entries), at most 256
-- An entry is an instant and the tokens charged then. One that is a window old, to
-- the microsecond, counts no more: a window holds its end and not its beginning.
-- Entries are kept as their age at `at`, so if the clock goes back they stay as old
-- as they are.
--
-- Memory is bounded: past 256 entries, those in one 128th of the window become one,
-- as late as the latest. At most 130 are left, and each token counts for at most a
-- 128th of the window longer than it should: that admits less, never more.
--
-- A packed string, not a sorted set, by MEMORY USAGE on Redis 7.0: of 256 entries
-- in an hour it takes 3 KB and a sorted set 31 KB, of 10 it takes 250 bytes and
-- 370; and a sorted set needs another key for what is no entry.

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
local MOST = 256

-- s.t and s.n are when and how much, oldest first; s.sum is the sum of n. Until
-- s.untl entries count for s.hold, if that is more than the window.

local function fresh(s, now, used, age)
  s.hold, s.untl, s.t, s.n, s.sum = s.w, 0, {}, {}, 0
  if used > 0 and age < s.w then s.t[1], s.n[1], s.sum = now - age, used, used end
end

local function read(s, v, from)
  if (#v - from) % 2 ~= 1 or #v > from + 1 + 2 * MOST then return false end
  s.hold, s.untl, s.t, s.n, s.sum = v[from], v[from + 1], {}, {}, 0
  if s.hold < s.w or s.hold > MOST_WINDOW then return false end
  local last = s.hold
  for k = from + 2, #v, 2 do
    if v[k] > last or v[k + 1] < 1 then return false end
    last = v[k]
    s.t[#s.t + 1], s.n[#s.n + 1], s.sum = s.at - v[k], v[k + 1], s.sum + v[k + 1]
  end
  return s.sum <= EXACT
end

local function write(s, v)
  v[#v + 1], v[#v + 2] = s.hold, s.untl
  for k = 1, #s.t do v[#v + 1], v[#v + 2] = s.at - s.t[k], s.n[k] end
end

local function back(s, now)
  local by = s.at - now
  for k = 1, #s.t do s.t[k] = s.t[k] - by end
  s.untl = max(0, s.untl - by)
end

-- gone returns when an entry of time t counts no more.
local function gone(s, t) return min(t + s.hold, max(t + s.w, s.untl)) end

-- drop forgets the first k entries.
local function drop(s, k)
  local t, n = {}, {}
  for j = k + 1, #s.t do t[#t + 1], n[#n + 1] = s.t[j], s.n[j] end
  s.t, s.n = t, n
end

local function advance(s, now)
  local k = 0
  while k < #s.t and gone(s, s.t[k + 1]) <= now do
    k = k + 1
    s.sum = s.sum - s.n[k]
  end
  if k > 0 then drop(s, k) end
  return false
end

-- What was charged under a longer window at version 0, where two limits may
-- alternate, counts as long as that was: or else each change would empty it.
local function change(s, now, newer, w)
  local hold = s.w
  if now < s.untl then hold = s.hold end
  if newer then hold = w end
  s.hold = max(hold, w)
  if s.hold > w then s.untl = max(s.untl, now + s.w) else s.untl = 0 end
  s.w = w
  advance(s, now)
end

local function used(s) return s.sum end

-- compact puts entries of one grain together.
local function compact(s)
  local grain = -floor(-s.hold / (MOST / 2))
  local t, n = {}, {}
  for k = 1, #s.t do
    if #t > 0 and floor(t[#t] / grain) == floor(s.t[k] / grain) then
      t[#t], n[#n] = s.t[k], n[#n] + s.n[k]
    else
      t[#t + 1], n[#n + 1] = s.t[k], s.n[k]
    end
  end
  s.t, s.n = t, n
end

local function charge(s, n)
  s.sum = s.sum + n
  if #s.t > 0 and s.t[#s.t] == now then
    s.n[#s.n] = s.n[#s.n] + n
  else
    s.t[#s.t + 1], s.n[#s.n + 1] = now, n
    if #s.t > MOST then compact(s) end
  end
end

local function debit(s, n)
  n = min(n, 2 * s.burst - s.sum)
  if n > 0 then charge(s, n) end
end

-- The oldest go, whichever came back: those that are left count for longer.
local function credit(s, n, mine)
  local k = 0
  while n > 0 and k < #s.t do
    local part = min(n, s.n[k + 1])
    s.n[k + 1], s.sum, n = s.n[k + 1] - part, s.sum - part, n - part
    if s.n[k + 1] > 0 then break end
    k = k + 1
  end
  if k > 0 then drop(s, k) end
end

local function clear(s) s.t, s.n, s.sum = {}, {}, 0 end

local function wait_for(s, n)
  local left, k = s.burst - s.sum, 0
  while left < n do
    k = k + 1
    left = left + s.n[k]
  end
  if k == 0 then return 0 end
  return gone(s, s.t[k]) - s.at
end

local function fill(s)
  if #s.t == 0 then return 0 end
  return gone(s, s.t[#s.t]) - s.at
end

