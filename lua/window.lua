-- window.lua: the fixed window. windows.lua, which follows it, has the contract.
--
-- Windows begin at multiples of their length on the server's clock. `taken` tokens
-- were granted in the one that ends at `ends`, those out on leases among them, and
-- `debt` is to be charged beside: what of it this window cannot hold, the next does.
--
-- Leases. A grant made at `now` lives ⌊0.95·min(ttl, ends − now)⌋ µs by the node's
-- clock, from before it sent the call. Let that clock be slower than the server's by
-- no more than 5 %. A token spent at a node's time less than TTL after the send is
-- spent, by the server's clock, less than TTL/0.95 ≤ ends − now after the send; the
-- send was before `now`; so it is spent before `ends`, in the window that counts
-- it. So at most burst tokens are spent in a window: taken never passes burst by a
-- grant, and falls only by a token that comes back in this same window, which was
-- counted, is off its node for good, and was in out (each leaves it at most once).
-- Leases that nobody reports stay counted, and so cost only this window.

local NEVER = 9000000000000000
local EXACT = 9007199254740992
local MOST_DEMAND = 4000000000000000 -- so that sums stay exact
local MOST_WINDOW = 31622400000000 -- 366 days
local SLACK_MS = 1000
local floor, max, min = math.floor, math.max, math.min

-- One reading of the clock for the whole script: before Redis 7.2 it moves on.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])

local SHORTEST = 1000 -- µs: a window that ends sooner is worth no lease
local LEASES = true

local function next_end(t, w) return (floor(t / w) + 1) * w end

local function fresh(s, now, used, age)
  s.ends, s.taken, s.debt = next_end(now, s.w), 0, 0
  if now - age >= s.ends - s.w then s.taken = max(0, used) end
end

local function read(s, v, from)
  if #v ~= from + 2 then return false end
  s.ends, s.taken, s.debt = v[from], v[from + 1], v[from + 2]
  return s.out0 + s.out1 <= s.taken and s.debt <= 2 * s.burst and s.ends > s.at and s.ends - s.at <= 2 * MOST_WINDOW
end

local function write(s, v) v[#v + 1], v[#v + 2], v[#v + 3] = s.ends, s.taken, s.debt end

-- Into an earlier window nothing is taken along but what is used: no gift, and
-- nobody waits for the clock to catch up.
local function back(s, now) s.ends = min(s.ends, next_end(now, s.w)) end

-- after returns the debt that is left of one when a window with `taken` ends.
local function after(s, taken, debt) return min(debt, max(0, taken + debt - s.burst)) end

local function advance(s, now)
  local rolled = false
  for _ = 1, 3 do
    if now < s.ends then return rolled end
    s.debt, s.taken, s.ends, rolled = after(s, s.taken, s.debt), 0, next_end(s.ends, s.w), true
  end
  if now >= s.ends then s.debt, s.ends = 0, next_end(now, s.w) end
  return rolled
end

-- With a window of another length the count goes on until that ends. At version 0,
-- where two limits may alternate, until the longer one does: or else each change
-- would empty it.
local function change(s, now, newer, w, burst)
  local ends = next_end(now, w)
  if newer then s.ends = ends else s.ends = max(s.ends, ends) end
  s.debt = min(s.debt, 2 * burst)
end

local function used(s) return s.taken + s.debt end

local function charge(s, n) s.taken = s.taken + n end

local function debit(s, n) s.debt = max(s.debt, min(s.debt + n, 2 * s.burst - s.taken)) end

-- What another window counted is not given to this one.
local function credit(s, n, mine)
  if mine then s.taken = s.taken - min(n, s.taken - s.out0 - s.out1) end
end

local function clear(s) s.taken, s.debt = s.out0 + s.out1, 0 end

-- passed returns the first end of a window from now on at which at most `most` is
-- used, if nothing is granted.
local function passed(s, most)
  local t, debt = s.ends, after(s, s.taken, s.debt)
  while debt > most do t, debt = next_end(t, s.w), after(s, 0, debt) end
  return t - s.at
end

local function wait_for(s, n)
  if s.burst - used(s) >= n then return 0 end
  return passed(s, s.burst - n)
end

local function fill(s)
  if used(s) == 0 then return 0 end
  return passed(s, 0)
end

