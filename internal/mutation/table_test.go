package mutation

// mutations are those of the protocol notes, and some more. Of the store's rules
// each is made twice: in the script and in the reference.
var mutations = []mutation{
	// The store: the reference.
	{
		"reference: reports before refill", "lease/leasetest/bucket.go",
		"\tb.advance(now)\n\n\tdirty = b.configure(now, call, count, perUS, ttl) || dirty\n\tdirty = b.settle(call) || dirty\n",
		"\tdirty = b.settle(call) || dirty\n\tb.advance(now)\n\n\tdirty = b.configure(now, call, count, perUS, ttl) || dirty\n",
		"lease", "^TestScenario15_LateReport$",
	},
	{
		"reference: leases do not count against the burst", "lease/leasetest/bucket.go",
		"\troom := b.limitUnits() - b.units\n\tdt :=", "\troom := b.burst*b.perUS - b.units\n\tdt :=",
		"lease", "^TestScenario13_Hoard$|^TestScenario14_GiveBack$",
	},
	{
		"reference: an epoch dropped as soon as it ends", "lease/leasetest/bucket.go",
		"\t\tb.out1, b.out0 = b.out0, 0\n", "\t\tb.out1, b.out0 = 0, 0\n",
		"lease", "^TestScenarioAny$",
	},
	{
		"reference: expiry without two ttl", "lease/leasetest/bucket.go",
		"full := b.refillTime(b.burst*b.perUS-b.units) + 2*b.ttl", "full := b.refillTime(b.burst*b.perUS - b.units)",
		"lease", "^TestStoreInMemory$",
	},
	{
		"reference: an epoch comes a second time", "lease/leasetest/bucket.go",
		"e < b.epoch-4 {", "e != b.epoch {",
		"lease", "^TestStoreInMemory$",
	},
	{
		"script: an epoch comes a second time", "lua/acquire.lua",
		"if e < epoch - 4 then", "if e ~= epoch then",
		"lua", "^TestStoreInProcess$",
	},
	{
		"reference: a return stays outstanding", "lease/leasetest/bucket.go",
		"\t\t*out -= returned\n", "",
		"lease", "^TestStoreInMemory$",
	},
	{
		"reference: a report takes more than is out", "lease/leasetest/bucket.go",
		"spent := min(r.Spent, *out)", "spent := r.Spent",
		"lease", "^TestStoreInMemory$",
	},
	{
		"reference: no pace", "lease/leasetest/bucket.go",
		"\t\tg.Pace = micros(min(b.ttl, ttl) / 2)\n", "",
		"lease", "^TestScenario02_OneNodeSaturates$|^TestScenario11_HerdAfterExhaustion$",
	},

	// The store: the script.
	{
		"script: reports before refill", "lua/acquire.lua",
		"  -- 1. Time, with the outstanding tokens as they were: refill before reports.\n",
		"  for r = 6, 9, 3 do\n" +
			"    if arg(r) == epoch then out0 = max(0, out0 - arg(r + 1)) ARGV[a + r + 1] = '0'\n" +
			"    elseif arg(r) == epoch - 1 then out1 = max(0, out1 - arg(r + 1)) ARGV[a + r + 1] = '0' end\n" +
			"  end\n",
		"lua", "^TestScenario15_LateReport$",
	},
	{
		"script: leases do not count against the burst", "lua/acquire.lua",
		"local room = (burst - out0 - out1) * per - units\n    local dt", "local room = burst * per - units\n    local dt",
		"lua", "^TestScenario13_Hoard$|^TestScenario14_GiveBack$",
	},
	{
		"script: an epoch dropped as soon as it ends", "lua/acquire.lua",
		"out1, out0, act1, act0, dem1, dem0 = out0, 0, act0, 0, dem0, 0", "out1, out0, act1, act0, dem1, dem0 = 0, 0, act0, 0, dem0, 0",
		"lua", "^TestScenarioAny$",
	},
	{
		"script: expiry without two ttl", "lua/acquire.lua",
		"(fill + 2 * ttl)", "fill",
		"lua", "^TestScenario28_Expiry$",
	},
	{
		"script: a return stays outstanding", "lua/acquire.lua",
		"      out0 = out0 - spent - returned\n", "      out0 = out0 - spent\n",
		"lua", "^TestStoreInProcess$",
	},
	{
		"script: a report takes more than is out", "lua/acquire.lua",
		"      returned = min(returned, out0 - spent)\n", "",
		"lua", "^TestStoreInProcess$",
	},
	{
		"script: no pace", "lua/acquire.lua",
		"then pace = period end", "then pace = 0 end",
		"lua", "^TestScenario02_OneNodeSaturates$|^TestScenario11_HerdAfterExhaustion$",
	},
	{
		"script: another limit of the same version wins", "lua/acquire.lua",
		"local accept = c_version > version", "local accept = c_version >= version",
		"lua", "^TestStoreInProcess$",
	},
	{
		"script: time in whole seconds", "lua/acquire.lua",
		"local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])", "local now = tonumber(clock[1]) * 1000000",
		"lua", "^TestStoreInProcess$",
	},

	// Windows, logs and counters: the reference, and the scripts.
	{
		"reference: a lease outlives its window", "lease/leasetest/window.go",
		"life = min(ttl, rest) * 95 / 100", "life = ttl * 95 / 100",
		"lease", "^TestFixedWindowInMemory$",
	},
	{
		"reference: leases come back into the next window", "lease/leasetest/window.go",
		"ended, b.out0, b.out1 = max(1, ended), 0, 0", "ended = max(0, ended-1)",
		"lease", "^TestFixedWindowInMemory$",
	},
	{
		"reference: an entry of the log ends early", "lease/leasetest/sliding.go",
		"l.gone(w, l.log[0]) <= now {", "l.gone(w, l.log[0]) <= now+1 {",
		"lease", "^TestSlidingLogInMemory$",
	},
	{
		"reference: a full log forgets the later time", "lease/leasetest/sliding.go",
		"entry{e.at, log[last].n + e.n}", "entry{log[last].at - grain, log[last].n + e.n}",
		"lease", "^TestSlidingLogInMemory$",
	},
	{
		"reference: the window before counts too little", "lease/leasetest/sliding.go",
		"return ceilDiv(c.prev*overlap, steps)", "return c.prev * overlap / steps",
		"lease", "^TestSlidingCounterInMemory$",
	},
	{
		"script: a lease outlives its window", "lua/windows.lua",
		"floor(min(c_ttl, rest) * 95 / 100)", "floor(c_ttl * 95 / 100)",
		"lua", "^TestFixedWindowInProcess$",
	},
	{
		"script: leases come back into the next window", "lua/windows.lua",
		"ended, s.out0, s.out1 = max(1, ended), 0, 0", "ended = max(0, ended - 1)",
		"lua", "^TestFixedWindowInProcess$",
	},
	{
		"script: a refund of the window before", "lua/window.lua",
		"  if mine then s.taken", "  if true then s.taken",
		"lua", "^TestWindowRefundOfAnother$",
	},
	{
		"script: an entry of the log ends early", "lua/log.lua",
		"gone(s, s.t[k + 1]) <= now do", "gone(s, s.t[k + 1]) <= now + 1 do",
		"lua", "^TestSlidingLogInProcess$",
	},
	{
		"script: a full log forgets the later time", "lua/log.lua",
		"t[#t], n[#n] = s.t[k], n[#n] + s.n[k]", "t[#t], n[#n] = t[#t] - grain, n[#n] + s.n[k]",
		"lua", "^TestSlidingLogInProcess$",
	},
	{
		"script: the window before counts too little", "lua/counter.lua",
		"return -floor(-s.prev * overlap / steps)", "return floor(s.prev * overlap / steps)",
		"lua", "^TestSlidingCounterInProcess$",
	},
	{
		"script: the window before does not count", "lua/counter.lua",
		"s.prev, s.taken, s.ends = s.taken, 0, next_end(s.ends, s.w)", "s.prev, s.taken, s.ends = 0, 0, next_end(s.ends, s.w)",
		"lua", "^TestSlidingCounterInProcess$",
	},
	{
		"script: windows that alternate are emptied", "lua/window.lua",
		"else s.ends = max(s.ends, ends) end", "else s.ends = ends end",
		"lua", "^TestFixedWindowInProcess$",
	},
	{
		"node: a log is leased", "lease/limit.go",
		" || !l.Algorithm.Leases()", "",
		"lease", "^TestLogsAreNotLeased$",
	},

	// What is sent.
	{
		"a call whose outcome is unknown is sent again", "lua/store.go",
		"NoRetry() bool { return true }", "NoRetry() bool { return false }",
		"lua", "^TestScenario17_ReplyLost$",
	},
	{
		"an unknown outcome taken for none", "lua/errors.go",
		"op.Op == \"dial\"", "op.Op != \"\"",
		"lua", "^TestScenario17_ReplyLost$",
	},

	// The node.
	{
		"deadline from receipt", "lease/refill.go",
		"tokens: leased, deadline: sent + int64(g.TTL)", "tokens: leased, deadline: now + int64(g.TTL)",
		"lease", "^TestScenario19_LateReply$",
	},
	{
		"late replies kept", "lease/refill.go",
		"deadline: sent + int64(g.TTL), forget: sent + 2*int64(call.TTL)}",
		"deadline: max(now+1e9, sent+int64(g.TTL)), forget: sent + 2*int64(call.TTL)}",
		"lease", "^TestScenario19_LateReply$",
	},
	{
		"leases spent after their deadline", "lease/holding.go",
		"case h.current.deadline != 0 && now >= h.current.deadline:", "case h.current.deadline != 0 && now < 0:",
		"lease", "^TestScenario19_LeaseEnds$",
	},
	{
		"coarse clock believed to the end", "lease/holding.go",
		"h.spendUntil.Store(b.deadline - int64(coarseLag))", "h.spendUntil.Store(b.deadline)",
		"lease", "^TestScenario19_LeaseEnds$",
	},
	{
		"leases kept over a suspension", "lease/clock.go",
		"return !first && gap > int64(suspendGap)", "return !first && gap < 0",
		"lease", "^TestScenario23_Suspended$",
	},
	{
		"reports again after an unknown outcome", "lease/refill.go",
		"case errors.Is(err, ErrNotExecuted), errors.Is(err, ErrRejected):",
		"case errors.Is(err, ErrNotExecuted), errors.Is(err, ErrRejected), errors.Is(err, ErrUnknownOutcome):",
		"lease", "^TestReportsAfterFailures$",
	},
	{
		"reports again after an answer", "lease/refill.go",
		"\th.unreported = h.unreported[:last]\n", "",
		"lease", "^TestScenario01_HalfDemand$|^TestScenario07_DemandMoves$",
	},
	{
		"reports lost after a refusal", "lease/refill.go",
		"\t\t\tu.Spent += r.Spent\n", "",
		"lease", "^TestReportsAfterFailures$",
	},
	{
		"pace ignored", "lease/refill.go",
		"\th.lastEpoch = g.Epoch\n", "\th.lastEpoch = g.Epoch\n\tg.Pace = 0\n",
		"lease", "^TestScenario02_OneNodeSaturates$|^TestScenario11_HerdAfterExhaustion$",
	},
	{
		"only admitted requests are demand", "lease/holding.go",
		"h.demand += float64(h.arrived) + float64(h.refused.Swap(0))", "h.demand += float64(h.arrived) + 0*float64(h.refused.Swap(0))",
		"lease", "^TestScenario05_ProportionalShares$",
	},
	{
		"a refusal remembered for smaller costs", "lease/holding.go",
		"now >= r.pace && (n < r.cost || now >= r.until)", "now >= r.pace && now >= r.until",
		"lease", "^TestScenario46_MixedCosts$",
	},
	{
		"retry after a smaller cost's", "lease/holding.go",
		"at := float64(r.metAt) + us(n-r.cost)", "at := float64(r.metAt)",
		"lease", "^TestScenario46_MixedCosts$",
	},
	{
		"retry after without what leases hold up", "lease/holding.go",
		"if n > r.room {", "if n > r.room && n < 0 {",
		"lease", "^TestScenario46_MixedCosts$",
	},
	{
		"leases not given back on Close", "lease/janitor.go",
		"\t\th.drainLocked(c)\n\t\th.queue.giveUp()\n\t\tif len", "\t\th.queue.giveUp()\n\t\tif len",
		"lease", "^TestScenario21_Shutdown$",
	},
	{
		"no call on Close", "lease/refill.go",
		"giveBack := h.giveBack || c.closed.Load()", "giveBack := h.giveBack && !c.closed.Load()",
		"lease", "^TestScenario21_Shutdown$",
	},
	{
		"returned tokens kept", "lease/holding.go",
		"\th.later = h.later[:0]\n\th.more.Store(false)\n\tc.ledger.returned.Add(returned)\n", "\tc.ledger.returned.Add(returned)\n",
		"lease", "^TestScenario07_DemandMoves$|^TestScenario21_Shutdown$|^TestScenario46_MixedCosts$",
	},
	{
		"tokens charged at once leased too", "lease/refill.go",
		"leased := g.Tokens - g.Bound;", "leased := g.Tokens;",
		"lease", "^TestScenario02_OneNodeSaturates$|^TestScenario08_WholeBurst$",
	},
	{
		"two calls for a key at a time", "lease/refill.go",
		"if h.flying || c.closed.Load() {", "if c.closed.Load() {",
		"lease", "^TestScenario10_ThunderingHerd$",
	},
	{
		"a second lease hidden by a refusal", "lease/cache.go",
		" && !h.more.Load()", "",
		"lease", "^TestScenario08_WholeBurst$",
	},

	// The fallback.
	{
		"fallback: a fresh share for each outage", "fallback/share.go",
		"\tfresh := sh.limiter == nil\n\tif !sh.outage {",
		"\tfresh := sh.limiter == nil || !sh.outage\n\tcall.Hint = lease.Hint{Known: true, Tokens: call.Limit.Burst}\n\tif !sh.outage {",
		"fallback", "^TestScenario30_Flapping$",
	},
	{
		"fallback: shares start full", "fallback/share.go",
		"most = max(0, min(sh.weight*balance, most))", "_ = balance",
		"fallback", "^TestScenario31_DrainedThenDown$",
	},
	{
		"fallback: no debt", "fallback/settle.go",
		"\tcall.Debt += sh.charging\n", "",
		"fallback", "^TestScenario30_Flapping$",
	},
	{
		"fallback: the debt is all that was admitted", "fallback/share.go",
		"over := sh.idle - sh.deficit(until); over > 0", "over := sh.idle - sh.deficit(until); false",
		"fallback", "^TestScenario32_LongOutage$",
	},
	{
		"fallback: the debt is all that the share lacks", "fallback/share.go",
		"over := sh.idle - sh.deficit(until); over > 0", "over := sh.idle - sh.deficit(until); over != 0",
		"fallback", "^TestScenario30_Flapping$|^TestDebts$|^TestRefundInAnOutage$",
	},
	{
		"fallback: a debt is forgotten when its call fails", "fallback/settle.go",
		"if err == nil || rejected {", "if true {",
		"fallback", "^TestDebts$",
	},
	{
		"fallback: debts only with calls for the key", "fallback/recovery.go",
		"; more {\n\t\treturn max(", "; more && false {\n\t\treturn max(",
		"fallback", "^TestScenario33_Recovery$",
	},
	{
		"fallback: own leases do not count against the burst", "fallback/share.go",
		"sh.burst-sh.out0-sh.out1-sh.spare)))", "sh.burst-sh.spare)))",
		"fallback", "^TestShareHoard$",
	},
	{
		"fallback: a limiter per node has the whole rate", "fallback/share.go",
		"equal := 1 / float64(n)", "equal := 1.0",
		"fallback", "^TestScenario29_WholeOutage$",
	},
	{
		"fallback: callers wait for the probe", "fallback/shard.go",
		"if sh.down.Load() || s.alive", "if s.alive",
		"fallback", "^TestNobodyWaitsTwice$",
	},
	{
		"fallback: a cancelled call is a failure", "fallback/shard.go",
		"\tcase errors.Is(ctx.Err(), context.Canceled):\n\t\treturn errNeutral\n", "",
		"fallback", "^TestCallersThatGiveUp$",
	},
	{
		"fallback: a deadline of the caller's is a failure", "fallback/shard.go",
		"time.Since(start) < s.opts.Timeout*9/10", "time.Since(start) < 0",
		"fallback", "^TestCallersThatGiveUp$",
	},
	{
		"fallback: a rejected call is a failure", "fallback/shard.go",
		"case err == nil, errors.Is(err, lease.ErrRejected):", "case err == nil:",
		"fallback", "^TestNeutralOutcomes$",
	},
	{
		"fallback: an overload of this node is a failure", "fallback/shard.go",
		"case errors.Is(err, lease.ErrOverloaded):", "case false:",
		"fallback", "^TestNeutralOutcomes$",
	},
	{
		"fallback: no ramp", "fallback/shard.go",
		"\tif sh.pause > firstBackoff {", "\tif false {",
		"fallback", "^TestRamp$",
	},
	{
		"fallback: no back-off", "fallback/recovery.go",
		"sh.pause = min(2*sh.pause, s.opts.Backoff)\n\t\treturn wait", "return wait",
		"fallback", "^TestScenario54_HalfOpen$",
	},
	{
		"fallback: late failures count", "fallback/shard.go",
		"t.life != t.shard.life.Load() {", "false {",
		"fallback", "^TestLateFailure$",
	},
	{
		"fallback: slowness is fine", "fallback/shard.go",
		"return slow >= slowCalls && now.Sub(sh.slowSince) >= slowFor", "return false",
		"fallback", "^TestScenario34_SlowServer$",
	},
	{
		"fallback: one slow answer is too many", "fallback/shard.go",
		"return slow >= slowCalls && now.Sub(sh.slowSince) >= slowFor", "return true",
		"fallback", "^TestSlowNowAndThen$",
	},
	{
		"fallback: every node owns a key that is too small", "fallback/share.go",
		"} else if known {\n\t\t\treturn 0\n", "} else if known {\n\t\t\treturn 1\n",
		"fallback", "^TestScenario42_OneAnHourInAnOutage$",
	},
	{
		"fallback: what was admitted while the store was in use is forgiven", "fallback/share.go",
		"life <= sh.life+1 && until", "until", "fallback", "^TestForgivenOnlyWhileIdle$",
	},
	{
		"fallback: all of a debt may be forgiven", "fallback/share.go",
		"\t} else {\n\t\tsh.firm += n\n", "\t} else {\n\t\tsh.idle += n\n", "fallback", "^TestForgivenOnlyWhileIdle$",
	},
	{
		"fallback: shares that had to go come back full", "fallback/table.go",
		"\t\t\tt.forgot.Store(true)\n", "", "fallback", "^TestEvictedSharesStartEmpty$",
	},
	{
		"fallback: pauses start anew with each life", "fallback/shard.go",
		"sh.pause > 0 && time.Since", "false && time.Since", "fallback", "^TestProbesPassCallsDoNot$",
	},
	{
		"node: reports are lost while the store is down", "lease/refill.go",
		"\tcase errors.Is(err, ErrNotExecuted), errors.Is(err, ErrRejected):\n\t\th.unreportLocked()\n", "\tcase errors.Is(err, ErrNotExecuted), errors.Is(err, ErrRejected):\n",
		"lease", "^TestReportsSurvive$",
	},
	{
		"node: a refusal of the share is remembered for long", "lease/refill.go",
		"r.source, wait = g.Source, min(wait, t.period)", "r.source = g.Source",
		"fallback", "^TestRecoveryIsNoticed$",
	},
	{
		"all: nothing is taken back", "lease/all.go",
		"if t := &taken[i]; t.err == nil && t.d.Allowed {\n\t\t\tc.undo(", "if t := &taken[i]; t.err != nil && t.d.Allowed {\n\t\t\tc.undo(",
		"lease", "^TestAllTakesBack$",
	},
	{
		"all: a token taken back is out twice", "lease/all.go",
		"\t\tu.Spent -= k\n", "",
		"lease", "^TestAllTakesBack$",
	},
	{
		"reference: the pace of a lowered burst is that of the old one", "lease/leasetest/bucket.go",
		"g.Pace = micros(min(b.ttl, ttl) / 2)", "g.Pace = micros(b.ttl / 2)",
		"internal/sim", "^TestLoweredBurstIsNotStarved$",
	},
}
