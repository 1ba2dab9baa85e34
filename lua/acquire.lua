-- acquire.lua: grant tokens of a bucket to a node as a lease.       O(#KEYS)
-- KEYS[i]  a bucket each, "<prefix>tb1:{<key>}"
-- ARGV     22 integers for each key:
--   1 burst (tokens)  2 count, 3 per_us: the rate is count tokens per per_us µs
--   4 version  5 ttl_us: how long a lease lives
--   6 epoch, 7 spent, 8 returned (tokens)   9, 10, 11: the same of a second epoch
--   12 refund (tokens)  13 debt (tokens)  14 reset (0 or 1)
--   15 need  16 bound  17 want (tokens)
--   18 demand (tokens per lease period)  19 last_epoch  20 share (0, 1, 2)
--   21 hint (tokens), 22 hint_age_us: what a bucket that is missing had, and how
--   long ago; at most the burst
-- returns  12 integers for each key, in order:
--   1 granted (tokens)  2 bound: of these, spent at once  3 epoch  4 ttl_us
--   5 remaining (tokens)  6 retry_after_us  7 reset_after_us  8 pace_us
--   9 outstanding (tokens)  10 active (nodes)
--   11 flags: 1 created, 2 corrupt, 4 the limit in force differs from the call's
--   12 demand that nodes told in the epoch before (tokens per lease period)
-- then     4 integers (version, burst, count, per_us) for each key with flag 4
--
-- State, one string: "1 units at epoch out0 out1 act0 act1 dem0 dem1 version
-- burst count per_us ttl_us". A token is per_us units, so every number is an
-- integer below 2^53 and exact. lease/leasetest.Bucket is the same in Go, and
-- says why each step stands where it does; lease/doc.go has the proof.

local NEVER = 9000000000000000
local EXACT = 9007199254740992
local MOST_DEMAND = 4000000000000000 -- so that sums stay exact
local MOST_TTL = 86400000000
local SLACK_MS = 1000
local floor, max, min = math.floor, math.max, math.min
local STATE = '^1 (%-?%d+)' .. string.rep(' (%d+)', 13) .. '$'
local FORMAT = '1' .. string.rep(' %.0f', 14)

-- One reading of the clock for the whole script: before Redis 7.2 it moves on.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])

-- load returns the 14 numbers of a state, or nil if it is no state of ours.
local function load(s)
  local v = { string.match(s, STATE) }
  if #v ~= 14 then return nil end
  for i = 1, 14 do
    v[i] = tonumber(v[i])
    if not v[i] or v[i] > EXACT or v[i] < -EXACT then return nil end
  end
  local burst, count, per, ttl = v[11], v[12], v[13], v[14]
  if burst < 1 or count < 1 or per < 1 or burst * per > EXACT then return nil end
  if ttl < 1000 or ttl > MOST_TTL then return nil end
  if v[1] > burst * per or v[1] < -burst * per then return nil end
  return v
end

local stored = redis.call('MGET', unpack(KEYS))
local reply, tail = {}, {}

for i = 1, #KEYS do
  local a = (i - 1) * 22
  local function arg(n) return tonumber(ARGV[a + n]) end
  local c_burst, c_count, c_per, c_version, c_ttl = arg(1), arg(2), arg(3), arg(4), arg(5)
  local flags = 0

  local units, at, epoch, out0, out1, act0, act1, dem0, dem1
  local version, burst, count, per, ttl
  local v = nil
  if stored[i] then
    v = load(stored[i])
    if not v then flags = 2 end
  end
  if v then
    units, at, epoch, out0, out1, act0, act1, dem0, dem1 =
      v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9]
    version, burst, count, per, ttl = v[10], v[11], v[12], v[13], v[14]
  else
    -- An expired key equals a full bucket. So does one that was lost, but for
    -- what the caller remembers of it.
    flags = flags + 1
    units, at, epoch = max(-c_burst, min(arg(21), c_burst)) * c_per, now, floor(now / c_ttl)
    units = units + min(arg(22) * c_count, c_burst * c_per - units)
    out0, out1, act0, act1, dem0, dem1 = 0, 0, 0, 0, 0, 0
    version, burst, count, per, ttl = c_version, c_burst, c_count, c_per, c_ttl
  end
  local dirty = flags >= 2

  local function refill(stop)
    local room = (burst - out0 - out1) * per - units
    local dt = stop - at
    at = stop
    if room > 0 then units = units + min(dt * count, room) end
  end

  -- 1. Time, with the outstanding tokens as they were: refill before reports.
  if now < at then
    at = now -- and the epoch must not come a second time while reports of it may
    local e = floor(now / ttl)
    if e < epoch - 4 then
      epoch, out0, out1 = e, out0 + out1, 0
      act0, act1, dem0, dem1 = max(act0, act1), 0, max(dem0, dem1), 0
    end
  else
    for _ = 1, 2 do
      local stop = (epoch + 1) * ttl
      if now < stop then break end
      refill(stop)
      epoch = epoch + 1
      out1, out0, act1, act0, dem1, dem0 = out0, 0, act0, 0, dem0, 0
    end
    local e = floor(now / ttl)
    if e > epoch then epoch, out1, act1, dem1 = e, 0, 0, 0 end
    refill(now)
  end

  -- 2. The limit: a newer one, or at version 0 the latest.
  local same = burst == c_burst and count == c_count and per == c_per
  local accept = c_version > version or (c_version == 0 and version == 0)
  if accept or (c_version == version and same) then
    local out = out0 + out1
    if accept and (not same or c_version ~= version) then
      local tokens = floor(units / per)
      local part = units - tokens * per
      tokens = max(-c_burst, min(tokens, c_burst))
      units = tokens * c_per + floor(part * c_per / per)
      version, burst, count, per = c_version, c_burst, c_count, c_per
      units = max(min(units, max(0, burst - out) * per), -burst * per)
      dirty = true
    end
    -- A shorter ttl waits until no lease is out.
    if c_ttl > ttl or (c_ttl < ttl and out == 0) then
      ttl, epoch, out0, out1 = c_ttl, floor(now / c_ttl), out, 0
      act0, act1, dem0, dem1 = max(act0, act1), 0, max(dem0, dem1), 0
      dirty = true
    end
  end

  -- 3. Reports: a token leaves the outstanding count at most once.
  for r = 6, 9, 3 do
    local e, spent, returned = arg(r), arg(r + 1), arg(r + 2)
    if e == epoch then
      spent = min(spent, out0)
      returned = min(returned, out0 - spent)
      out0 = out0 - spent - returned
    elseif e == epoch - 1 then
      spent = min(spent, out1)
      returned = min(returned, out1 - spent)
      out1 = out1 - spent - returned
    else
      spent, returned = 0, 0
    end
    -- A lowered burst may have less room than comes back.
    units = units + max(0, min(returned * per, (burst - out0 - out1) * per - units))
    dirty = dirty or spent > 0 or returned > 0
  end
  local refund, debt = arg(12), arg(13)
  local room = (burst - out0 - out1) * per - units
  if refund > 0 and room > 0 then
    units = units + min(min(refund, burst) * per, room)
    dirty = true
  end
  if debt > 0 then
    units = max(units - min(debt, 2 * burst) * per, -burst * per)
    dirty = true
  end
  if arg(14) == 1 then
    units = max(units, (burst - out0 - out1) * per)
    dirty = true
  end

  -- 4. Count the caller as active, once per epoch.
  local need, bound, want, share = arg(15), arg(16), arg(17), arg(20)
  local demand = max(1, min(arg(18), burst))
  if want > 0 and arg(19) ~= epoch then
    act0, dem0 = act0 + 1, min(dem0 + demand, MOST_DEMAND)
    dirty = true
  end

  -- 5. Grant: at most a fair share of the refill, or of a bucket that has more
  -- what the others would leave, and of that, beyond what waits, half.
  local avail = floor(units / per)
  -- A lease is no longer than asked for, though the bucket's ttl may be.
  local term = min(ttl, c_ttl)
  local flow, period = burst, floor(term / 2)
  if period <= floor(burst * per / count) then flow = floor(period * count / per) end
  local fair, others = 0, 0
  if share == 0 then
    local n = max(1, act0, act1)
    fair = floor(flow / n)
    others = (n - 1) * fair
  elseif share == 1 then
    local all = max(1, dem0, dem1)
    fair = floor(flow * min(demand, all) / all)
    others = flow - fair
  end
  local granted, at_once = 0, 0
  if avail > 0 and avail >= need and want > 0 then
    local waiting, most = need, avail
    if need > 0 then waiting = max(need, floor(min(avail, bound) / need) * need) end
    if share < 2 then
      most = max(fair, avail - others)
      if most > 2 * fair then
        most = max(2 * fair, min(most, waiting + floor((avail - waiting + 1) / 2)))
      end
    end
    granted = min(avail, max(need, min(want, most)))
    if need > 0 then at_once = floor(min(granted, bound) / need) * need end
    units = units - granted * per
    out0 = out0 + granted - at_once
    dirty = true
  end
  local pace = 0
  if granted < want and floor(units / per) <= others then pace = period end

  -- 6. How long until `need` would be met, leases holding up refill.
  local goal, wait = max(1, need), NEVER
  if goal <= burst then
    local short = goal * per
    local u, t, e, o0, o1 = units, at, epoch, out0, out1
    wait = nil
    for _ = 1, 2 do
      if u >= short then wait = t - at break end
      local stop, limit = (e + 1) * ttl, (burst - o0 - o1) * per
      if limit >= short then
        local w = -floor((u - short) / count)
        if t + w <= stop then wait = t - at + w break end
      end
      if limit > u then u = u + min((stop - t) * count, limit - u) end
      t, e, o1, o0 = stop, e + 1, o0, 0
    end
    wait = wait or (t - at + max(0, -floor((u - short) / count)))
  end

  local fill = max(0, -floor((units - burst * per) / count))
  if dirty then
    local px = -floor(-(fill + 2 * ttl) / 1000) + SLACK_MS
    redis.call('SET', KEYS[i], string.format(FORMAT, units, at, epoch, out0, out1, act0, act1,
      dem0, dem1, version, burst, count, per, ttl), 'PX', string.format('%.0f', px))
  end

  if version ~= c_version or burst ~= c_burst or count ~= c_count or per ~= c_per then
    flags = flags + 4
    for _, x in ipairs({ version, burst, count, per }) do tail[#tail + 1] = x end
  end
  for _, x in ipairs({ granted, at_once, epoch, floor(term * 95 / 100), max(0, floor(units / per)),
    wait, fill, pace, out0 + out1, max(1, act0, act1), flags, dem1 }) do
    reply[#reply + 1] = x
  end
end

for _, x in ipairs(tail) do reply[#reply + 1] = x end
return reply
