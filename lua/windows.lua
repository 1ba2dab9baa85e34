-- windows.lua: what window.lua, log.lua and counter.lua share. Go puts one of
-- them before this file to make a script.                            O(#KEYS)
-- KEYS[i]  the state of a key each, "<prefix><tag>:{<key>}", tag fw1, sl1 or sc1
-- ARGV     22 integers for each key, and
-- returns  12 for each key and 4 more for those with flag 4: as acquire.lua. The
--   window is burst·per_us/count µs, rounded up, and holds burst tokens.
--   Outstanding are leases of the window that is. Epochs number stretches of no
--   particular length, and grow by one or more whenever a ttl or a window ends.
--
-- State, one string: "1 at epoch first out0 out1 act0 act1 dem0 dem1 version burst
-- count per_us …", then the algorithm's numbers; all integers from 0 to 2^53, and
-- exact. first is the epoch that the window began with. leasetest.Window is the
-- same in Go.
--
-- The algorithm's part has defined: LEASES, and of a state s
--   fresh(s, now, used, age)   nothing used, but `used` tokens `age` µs ago
--   read(s, v, from), write(s, v)   its numbers, in v from `from` on
--   back(s, now)               the clock went back from s.at to now: no gift
--   advance(s, now)            now is no earlier: what ends, ends; true if a window did
--   change(s, now, newer, w, burst)   w and burst are new, s has the old ones
--   used(s), charge(s, n), debit(s, n), credit(s, n, mine), clear(s)
--   wait_for(s, n), fill(s)    µs until n tokens are there, until nothing is used

local stored = redis.call('MGET', unpack(KEYS))
local reply, tail = {}, {}

-- window returns the length of the window in µs.
local function window(burst, count, per) return -floor(-(burst * per) / count) end

-- load returns a state, or nil if it is no state of ours.
local function load(text)
  local v, length = {}, 1
  for word in string.gmatch(text, ' (%d+)') do
    local x = tonumber(word)
    if not x or x > EXACT then return nil end
    v[#v + 1] = x
    length = length + 1 + #word
  end
  if string.sub(text, 1, 1) ~= '1' or length ~= #text or #v < 13 then return nil end
  local s = {
    at = v[1], epoch = v[2], first = v[3], out0 = v[4], out1 = v[5], act0 = v[6], act1 = v[7],
    dem0 = v[8], dem1 = v[9], version = v[10], burst = v[11], count = v[12], per = v[13],
  }
  if s.burst < 1 or s.count < 1 or s.per < 1 or s.burst * s.per > EXACT then return nil end
  s.w = window(s.burst, s.count, s.per)
  if s.w < 1000 or s.w > MOST_WINDOW or not read(s, v, 14) then return nil end
  return s
end

for i = 1, #KEYS do
  local a = (i - 1) * 22
  local function arg(n) return tonumber(ARGV[a + n]) end
  local c_burst, c_count, c_per, c_version, c_ttl = arg(1), arg(2), arg(3), arg(4), arg(5)
  local flags = 0

  local s = nil
  if stored[i] then
    s = load(stored[i])
    if not s then flags = 2 end
  end
  if not s then
    -- An expired key has nothing used. So has one that was lost, but for what the
    -- caller remembers of it.
    flags = flags + 1
    s = {
      at = now, epoch = floor(now / c_ttl), out0 = 0, out1 = 0, act0 = 0, act1 = 0, dem0 = 0, dem1 = 0,
      version = c_version, burst = c_burst, count = c_count, per = c_per,
      w = window(c_burst, c_count, c_per),
    }
    s.first = s.epoch
    fresh(s, now, c_burst - max(-c_burst, min(arg(21), c_burst)), arg(22))
  end
  local dirty = flags >= 2

  -- 1. Time. The number of an epoch never comes a second time, or reports of the
  -- first would be taken off the leases of the second.
  if now < s.at then
    back(s, now)
  else
    local ended = floor(now / c_ttl) - floor(s.at / c_ttl)
    local rolled = advance(s, now)
    if rolled then
      -- Leases ended with the window, spent or not.
      ended, s.out0, s.out1 = max(1, ended), 0, 0
    end
    if ended > 0 then
      s.epoch = s.epoch + ended
      if rolled then s.first = s.epoch end
      s.out1, s.act1, s.dem1 = s.out0, s.act0, s.dem0
      if ended > 1 then s.out1, s.act1, s.dem1 = 0, 0, 0 end
      s.out0, s.act0, s.dem0 = 0, 0, 0
    end
  end
  s.at = now

  -- 2. The limit: a newer one, or at version 0 the latest. What is used stays used.
  local same = s.burst == c_burst and s.count == c_count and s.per == c_per
  local accept = c_version > s.version or (c_version == 0 and s.version == 0)
  if accept and (not same or c_version ~= s.version) then
    local w = window(c_burst, c_count, c_per)
    local newer = c_version > s.version
    if not same then change(s, now, newer, w, c_burst) end
    s.version, s.burst, s.count, s.per, s.w = c_version, c_burst, c_count, c_per, w
    dirty = true
  end

  -- 3. Reports: a token leaves the outstanding count at most once. Only what comes
  -- back in its own window can be used again.
  for r = 6, 9, 3 do
    local e, spent, returned = arg(r), arg(r + 1), arg(r + 2)
    if e == s.epoch then
      spent = min(spent, s.out0)
      returned = min(returned, s.out0 - spent)
      s.out0 = s.out0 - spent - returned
    elseif e == s.epoch - 1 then
      spent = min(spent, s.out1)
      returned = min(returned, s.out1 - spent)
      s.out1 = s.out1 - spent - returned
    else
      spent, returned = 0, 0
    end
    if returned > 0 then credit(s, returned, true) end
    dirty = dirty or spent > 0 or returned > 0
  end
  local refund, debt, last_epoch = arg(12), arg(13), arg(19)
  if refund > 0 then
    -- A node that had nothing of this window gives back what is of another.
    credit(s, refund, last_epoch < 0 or last_epoch >= s.first)
    dirty = true
  end
  if debt > 0 then
    debit(s, min(debt, 2 * s.burst))
    dirty = true
  end
  if arg(14) == 1 then
    clear(s)
    dirty = true
  end

  -- 4. Count the caller as active, once per epoch.
  local need, bound, want, share = arg(15), arg(16), arg(17), arg(20)
  local demand = max(1, min(arg(18), s.burst))
  if want > 0 and last_epoch ~= s.epoch then
    s.act0, s.dem0 = s.act0 + 1, min(s.dem0 + demand, MOST_DEMAND)
    dirty = true
  end

  -- 5. Grant. A lease is not more than a fair part of what is left, for nothing
  -- comes in before the window ends, and lives no longer than the window.
  local avail = s.burst - used(s)
  local most, ttl, asked = avail, floor(c_ttl * 95 / 100), want
  local granted, at_once, pace = 0, 0, 0
  if LEASES then
    local rest = s.ends - now
    ttl = floor(min(c_ttl, rest) * 95 / 100)
    if rest < SHORTEST then want = min(want, bound) end
    if share == 0 then
      most = max(1, floor(avail / max(1, s.act0, s.act1)))
    elseif share == 1 then
      local all = max(1, s.dem0, s.dem1)
      most = max(1, floor(avail * min(demand, all) / all))
    end
  else
    want = min(want, bound)
  end
  if avail > 0 and avail >= need and want > 0 then
    granted = min(avail, max(need, min(want, most)))
    if need > 0 then at_once = floor(min(granted, bound) / need) * need end
    if not LEASES then granted = at_once end
    if granted > 0 then charge(s, granted) end
    s.out0 = s.out0 + granted - at_once
    dirty = true
  end
  local remaining = s.burst - used(s)
  if LEASES and granted < asked and remaining <= max(0, avail - most) then
    pace = min(floor(c_ttl / 2), s.ends - now)
  end

  local goal, wait = max(1, need), NEVER
  if goal <= s.burst then wait = wait_for(s, goal) end
  local reset = fill(s)
  if dirty then
    -- Until nothing is used and no report can come the key's loss could be noticed.
    local px = -floor(-(reset + 2 * c_ttl) / 1000) + SLACK_MS
    local v = {
      s.at, s.epoch, s.first, s.out0, s.out1, s.act0, s.act1, s.dem0, s.dem1, s.version, s.burst, s.count, s.per,
    }
    write(s, v)
    for k = 1, #v do v[k] = string.format('%.0f', v[k]) end
    redis.call('SET', KEYS[i], '1 ' .. table.concat(v, ' '), 'PX', string.format('%.0f', px))
  end

  if s.version ~= c_version or s.burst ~= c_burst or s.count ~= c_count or s.per ~= c_per then
    flags = flags + 4
    for _, x in ipairs({ s.version, s.burst, s.count, s.per }) do tail[#tail + 1] = x end
  end
  for _, x in ipairs({ granted, at_once, s.epoch, ttl, max(0, remaining), wait, reset, pace,
    s.out0 + s.out1, max(1, s.act0, s.act1), flags, s.dem1 }) do
    reply[#reply + 1] = x
  end
end

for _, x in ipairs(tail) do reply[#reply + 1] = x end
return reply
