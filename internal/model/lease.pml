/*
 * The lease protocol for one key, two nodes and a bad network, for spin.
 *
 * Time is in ticks and has no end: whatever refers to it is kept relative to now
 * (the age of an epoch, the life left to a lease, how long ago the bucket was
 * saved), so the states are finite and spin visits all of them. Between two
 * ticks anything may happen, any number of times and in any order.
 *
 *   store  lease/leasetest/bucket.go and lua/acquire.lua: lazy refill, two
 *          counters of outstanding tokens, reports, grants, expiry of the key
 *   node   lease/refill.go and lease/holding.go: leases with deadlines, tallies
 *          that travel in a call at most once, give-back, crash
 *   clock  one tick
 *
 * What a store grants and what a node asks for, spends and returns is left open:
 * every policy is one of the runs. README.md says how to run it.
 *
 * Bounds, each a -D flag:    BURST tokens (2, at most 4), TTL ticks (2 or 3), TOKEN
 *                            ticks to refill a token (1), NODES (2; 1 to 3)
 * More behaviour:            KEEP: tokens charged for a request that has left
 *                            stay on the node (doc.go); it takes a BURST of 3
 *                            BACK: the store's clock goes back, again and again,
 *                            by up to a TTL
 * One flaw each:             UNCOUNTED REPORT_FIRST ROTATE_FIRST DROP_EARLY
 *                            STALE_REPORT EXPIRE_EARLY DUPLICATE RESEND
 *                            FROM_RECEIPT LATE_REPLY RETURN_LATER KEEP_ALL KEEP_TTL FOLD
 * Only the promise:          PROMISE: assert what is promised, not why
 */

#ifndef BURST
#define BURST 2
#endif
#ifndef TTL
#define TTL 2
#endif
#ifndef TOKEN
#define TOKEN 1
#endif
#ifndef NODES
#define NODES 2
#endif
#define FULL (BURST * TOKEN) /* units: the rate is one a tick, a token is TOKEN */

/* --- state ---------------------------------------------------------------- */

/* Tokens are told apart by the age of the epoch they were leased in: 0 is the
 * store's epoch by now, 1 the one before. Reports of older ones mean nothing to
 * the store, unless its clock goes back. Age a is at index AGE0 + a; below AGE0
 * are epochs that the store has yet to reach again. */
#ifdef FOLD
#define AGE0 1
#else
#define AGE0 0
#endif
#ifdef BACK
#define AGES (AGE0 + 3)
#else
#define AGES 2
#endif
#define KINDS ((AGE0 + 3) * TTL) /* of live tokens: by age, the last all above, and ticks left */

typedef Report {
  byte spent[AGES];
  byte returned[AGES]
}

mtype:stage = { idle, sent, executed };

typedef Node {
  byte live[KINDS];   /* leased tokens, at index of age * TTL + ticks left - 1 */
  Report tally;       /* not yet reported */
  mtype:stage call;   /* the one call in flight */
  Report aboard;      /* reports in it */
  byte life;          /* ticks left to what it may be granted: from before the send */
  byte granted, age;  /* in the reply: tokens and the index of their epoch's age */
#ifdef KEEP
  byte keep;          /* in the reply: tokens charged for nobody that may be kept */
  byte kept[TTL]      /* those kept, at ticks left - 1 */
#endif
}

Node node[NODES];

bool pending; /* a call its node has given up, that the store may yet execute */
Report late;  /* reports in it */

byte b = FULL, out0, out1;    /* the bucket as saved: units, outstanding tokens */
short lag, phaseThen;         /* ticks since then, and what phase was */
byte nowB = FULL, now0, now1; /* the same by now, as the proof sees it */
short phase;                  /* ticks since the epoch began */

/* Whether the key is as good as missing: a new bucket is full. */
#ifdef BACK
bool missing = true; /* no: its epoch would be that of the clock */
#else
#define missing (b == FULL && out0 + out1 == 0)
#endif

byte level; /* units: drains one a tick, fed by what is admitted */

/* For use within one step: 0 between steps, so that they add no states. */
short xB, x0, x1, room, some, dt, i, j, k;
bool dirty;                 /* the bucket xB, x0, x1 is to be saved */
byte who, want, gone, kind; /* what is chosen for the step */
short live, stay;
bool ended;                 /* an epoch did with this tick */

/* --- reports ------------------------------------------------------------- */

inline clear(r) {
  k = 0;
  do
  :: k < AGES -> r.spent[k] = 0; r.returned[k] = 0; k++
  :: else -> break
  od
}

inline add(to, r) {
  k = 0;
  do
  :: k < AGES ->
    to.spent[k] = to.spent[k] + r.spent[k];
    to.returned[k] = to.returned[k] + r.returned[k];
    k++
  :: else -> break
  od
}

inline copy(to, r) { clear(to); add(to, r) }

/* An epoch ends: theirs grow older by one. */
inline older(r) {
#ifdef STALE_REPORT
  r.spent[0] = r.spent[0] + r.spent[1]; r.returned[0] = r.returned[0] + r.returned[1];
#endif
  k = AGES - 1;
  do
  :: k > 0 -> r.spent[k] = r.spent[k - 1]; r.returned[k] = r.returned[k - 1]; k--
  :: else -> break
  od;
  r.spent[0] = 0; r.returned[0] = 0
}

#ifdef BACK
/* The clock goes back into the epoch before: everything grows younger. */
inline younger(r) {
  k = 0;
  do
  :: k < AGES - 1 -> r.spent[k] = r.spent[k + 1]; r.returned[k] = r.returned[k + 1]; k++
  :: else -> break
  od;
  r.spent[AGES - 1] = 0; r.returned[AGES - 1] = 0
}

/* Nodes forget what they have not reported 2 TTL after it was leased, and no call
 * is on its way for that long. The key lives longer. */
inline forgetAll() {
  i = 0;
  do
  :: i < NODES -> clear(node[i].tally); clear(node[i].aboard); i++
  :: else -> break
  od;
  clear(late)
}

inline youngerAll() {
  i = 0;
  do
  :: i < NODES ->
    k = 0;
    do
    :: k < KINDS - TTL -> node[i].live[k] = node[i].live[k + TTL]; k++
    :: k >= KINDS - TTL && k < KINDS -> node[i].live[k] = 0; k++
    :: else -> break
    od;
    node[i].age = (node[i].age > 0 -> node[i].age - 1 : 0);
    younger(node[i].tally); younger(node[i].aboard);
    i++
  :: else -> break
  od;
  younger(late)
}

#ifdef FOLD
/* The epoch goes back with the clock, and all leases count in the one before.
 * Without this it stays until the clock has caught up, so no two grants that are
 * an epoch apart are of the same epoch. */
inline fold() {
  if
  :: lag < 0 && phase < 0 ->
    phase = phase + TTL;
    x0 = x0 + x1; x1 = 0;
    dirty = true;
    youngerAll()
  :: else
  fi
}
#endif
#endif

/* --- the store's arithmetic ------------------------------------------------ */

#ifdef UNCOUNTED
#define ROOM(units, outA, outB) (FULL - (units))
#else
#define ROOM(units, outA, outB) (FULL - (units) - TOKEN * ((outA) + (outB)))
#endif

#ifdef DROP_EARLY
#define OLDER(out) 0
#else
#define OLDER(out) (out)
#endif

inline refill(ticks) {
  room = ROOM(xB, x0, x1);
  if
  :: room > 0 -> xB = xB + (ticks < room -> ticks : room)
  :: else
  fi
}

/* Bucket.advance: lag ticks at once, split where epochs end. */
inline advance() {
  dt = (lag > 0 -> lag : 0); /* the clock went back: no refill */
  i = phaseThen;
  j = 0;
  do
  :: j < 2 && i + dt >= TTL ->
#ifdef ROTATE_FIRST
    x1 = OLDER(x0); x0 = 0;
    refill(TTL - i);
#else
    refill(TTL - i);
    x1 = OLDER(x0); x0 = 0;
#endif
    dt = dt - (TTL - i); i = 0; j++
  :: else -> break
  od;
  refill(dt)
}

/* A report lowers a counter, saturating; what is returned goes to the balance. */
inline less(out, n) {
  some = (n < out -> n : out);
  out = out - some;
  dirty = dirty || some > 0
}

inline settleEpoch(out, used, back) {
  less(out, used);
  less(out, back);
  room = ROOM(xB, x0, x1);
  some = (some * TOKEN < room -> some * TOKEN : room);
  xB = xB + (some > 0 -> some : 0)
}

/* epochs: how many have ended since the counters were as they are. */
inline settle(r, epochs) {
  if
  :: epochs == 0 ->
    settleEpoch(x0, r.spent[AGE0], r.returned[AGE0]);
    settleEpoch(x1, r.spent[AGE0 + 1], r.returned[AGE0 + 1])
  :: epochs == 1 ->
    settleEpoch(x0, r.spent[AGE0 + 1], r.returned[AGE0 + 1])
  :: else
  fi
}

inline load() { xB = b; x0 = out0; x1 = out1 }

/* Time, then reports: the order that the proof needs. */
inline open(r) {
  load();
#ifdef REPORT_FIRST
  settle(r, (phaseThen + lag) / TTL);
  advance()
#else
  advance();
#ifndef PROMISE
  /* To refill lazily is to refill each tick. */
  assert(xB == nowB && x0 == now0 && x1 == now1);
#endif
#ifdef FOLD
  fold();
#endif
  settle(r, 0)
#endif
}

/* Grants, leaving the number of tokens in some. */
inline grant() {
  some = xB / TOKEN;
  some = (want < some -> want : some);
  xB = xB - some * TOKEN;
  x0 = x0 + some;
  dirty = dirty || some > 0
}

inline save() {
  if
  :: dirty ->
    b = xB; out0 = x0; out1 = x1;
#ifdef BACK
    missing = false;
#endif
    lag = 0; phaseThen = (missing -> 0 : phase);
    nowB = xB; now0 = x0; now1 = x1
  :: else /* the next call computes the same again */
  fi
}

/* --- the proof --------------------------------------------------------------- */

/* done ends every step: what must hold after it. live becomes O: tokens on live
 * leases, those in a reply that is not too late included. stay are the tokens
 * that nodes have, or may have, though the store booked them as spent. */
inline done() {
  i = 0;
  do
  :: i < NODES ->
    j = 0;
    do
    :: j < KINDS -> live = live + node[i].live[j]; j++
    :: else -> break
    od;
    live = live + (node[i].call == executed && node[i].life > 0 -> node[i].granted : 0);
#ifdef KEEP
    j = 0;
    do
    :: j < TTL -> stay = stay + node[i].kept[j]; j++
    :: else -> break
    od;
    stay = stay + (node[i].call == executed && node[i].life > 0 -> node[i].keep : 0);
#endif
    i++
  :: else -> break
  od;
  printf("    b %d  out %d+%d  O %d  level %d\n", nowB, now0, now1, live, level);
#ifndef PROMISE
  assert(live <= now0 + now1);                             /* O is never more than its count */
  assert(nowB + TOKEN * (now0 + now1 + stay) <= FULL);     /* which counts against the burst */
  assert(level + nowB + TOKEN * (live + stay) <= FULL);    /* so whatever is spent next, */
#endif
  assert(level <= FULL);                                   /* the promise holds */
  xB = 0; x0 = 0; x1 = 0; dirty = false; room = 0; some = 0; dt = 0; i = 0; j = 0; k = 0;
  who = 0; want = 0; gone = 0; kind = 0; live = 0; stay = 0; ended = false
}

/* --- the store --------------------------------------------------------------- */

inline anyWant() {
  do
  :: want < BURST -> want++
  :: break
  od
}

/* Carry out n's call: any grant up to want. Of what the bucket has then, some may
 * be charged for requests that have left meanwhile. */
inline serve(n) {
  printf("store: executes the call of node %d, want %d\n", who, want);
  open(n.aboard);
  grant();
  n.call = executed; n.granted = some; n.age = AGE0;
#ifdef KEEP
  some = xB / TOKEN;
  n.keep = (gone < some -> gone : some);
  xB = xB - n.keep * TOKEN;
  dirty = dirty || n.keep > 0;
  some = FULL - xB - TOKEN * (x0 + x1);
#ifndef KEEP_TTL
  some = some - TTL; /* what comes in while they may be spent */
#endif
  some = (some > 0 -> some / TOKEN : 0);
#ifndef KEEP_ALL
  n.keep = (n.keep < some -> n.keep : some);
#endif
#endif
  save();
#ifdef DUPLICATE
  if
  :: !pending -> pending = true; copy(late, n.aboard)
  :: else
  fi;
#endif
#ifndef RESEND
  clear(n.aboard);
#endif
  done()
}

inline serveLate() {
  printf("store: executes a call that was given up, want %d\n", want);
  open(late);
  grant();
  save();
  pending = false;
  clear(late);
  done()
}

proctype store() {
  do
  :: atomic {
      if
      :: node[0].call == sent -> who = 0
#if NODES > 1
      :: node[1].call == sent -> who = 1
#endif
#if NODES > 2
      :: node[2].call == sent -> who = 2
#endif
      fi;
      anyWant();
#ifdef KEEP
      do
      :: want + gone < BURST -> gone++
      :: break
      od;
#endif
      d_step { serve(node[who]) }
    }
  :: atomic { pending -> anyWant(); d_step { serveLate() } }
  :: d_step { nowB >= TOKEN -> /* a request that waited: spent at once (Call.Bound) */
      printf("store: charges a token as spent\n");
      load(); advance();
      xB = xB - TOKEN; level = level + TOKEN; dirty = true;
      save(); done()
    }
  od
}

/* --- a node -------------------------------------------------------------------- */

#define me node[id]

#ifdef KEEP
inline anyKept() {
  if
  :: me.kept[0] > 0 -> kind = 0
  :: me.kept[1] > 0 -> kind = 1
#if TTL > 2
  :: me.kept[2] > 0 -> kind = 2
#endif
  fi
}
#endif

/* Choose a token of a lease. */
inline anyLive() {
  if
  :: me.live[0] > 0 -> kind = 0
  :: me.live[1] > 0 -> kind = 1
  :: me.live[2] > 0 -> kind = 2
  :: me.live[3] > 0 -> kind = 3
  :: me.live[4] > 0 -> kind = 4
  :: me.live[5] > 0 -> kind = 5
#if KINDS > 6
  :: me.live[6] > 0 -> kind = 6
  :: me.live[7] > 0 -> kind = 7
#endif
#if KINDS > 8
  :: me.live[8] > 0 -> kind = 8
#endif
#if KINDS > 9
  :: me.live[9] > 0 -> kind = 9
  :: me.live[10] > 0 -> kind = 10
  :: me.live[11] > 0 -> kind = 11
#endif
  fi
}

/* The call is over. */
inline over(n) {
  n.call = idle; n.life = 0; n.granted = 0; n.age = 0;
  clear(n.aboard);
#ifdef KEEP
  n.keep = 0;
#endif
}

inline crash(n) {
  over(n);
  clear(n.tally);
  i = 0;
  do
  :: i < KINDS -> n.live[i] = 0; i++
  :: else -> break
  od;
#ifdef KEEP
  i = 0;
  do
  :: i < TTL -> n.kept[i] = 0; i++
  :: else -> break
  od;
#endif
}

/* The outcome stays unknown: neither the reports nor the grant are used. */
inline giveUp(n) {
#ifdef RESEND
  add(n.tally, n.aboard);
#endif
  over(n)
}

proctype server(byte id) {
  do
  :: atomic { anyLive() -> d_step { /* admit a request from a lease */
      printf("node %d: spends a token, age %d, %d ticks left\n", id, kind / TTL - AGE0, kind % TTL + 1);
      me.live[kind]--; level = level + TOKEN;
      if
      :: kind < AGES * TTL -> me.tally.spent[kind / TTL]++
      :: else
      fi;
      done() }
    }
  :: atomic { anyLive() -> d_step {
      printf("node %d: returns a token, age %d, %d ticks left\n", id, kind / TTL - AGE0, kind % TTL + 1);
#ifndef RETURN_LATER
      me.live[kind]--;
#endif
      if
      :: kind < AGES * TTL -> me.tally.returned[kind / TTL]++
      :: else
      fi;
      done() }
    }
#ifdef KEEP
  :: atomic { anyKept() -> d_step {
      printf("node %d: spends a kept token, %d ticks left\n", id, kind + 1);
      me.kept[kind]--; level = level + TOKEN; done() }
    }
#endif

  :: d_step { me.call == idle -> /* the tally leaves the node with the call */
      printf("node %d: sends a call, spent %d+%d returned %d+%d\n", id, me.tally.spent[AGE0],
        me.tally.spent[AGE0 + 1], me.tally.returned[AGE0], me.tally.returned[AGE0 + 1]);
      me.call = sent; me.life = TTL;
      copy(me.aboard, me.tally); clear(me.tally);
      done()
    }
  :: d_step { me.call == executed ->
#ifdef FROM_RECEIPT
      me.life = TTL;
#endif
#ifdef LATE_REPLY
      me.life = (me.life > 0 -> me.life : 1);
#endif
      printf("node %d: receives %d tokens, %d ticks left\n", id, me.granted, me.life);
      if
      :: me.life > 0 ->
        i = me.age * TTL + me.life - 1;
        me.live[i] = me.live[i] + me.granted;
#ifdef KEEP
        me.kept[me.life - 1] = me.kept[me.life - 1] + me.keep;
#endif
      :: else /* too late: worth nothing */
      fi;
      over(me); done()
    }
  :: d_step { me.call == sent -> /* certainly not executed: reported again */
      printf("node %d: learns that its call was not executed\n", id);
      add(me.tally, me.aboard); over(me); done()
    }
  :: d_step { me.call != idle -> /* request or reply lost */
      printf("node %d: gives its call up, which is over\n", id);
      giveUp(me); done()
    }
  :: d_step { me.call == sent && !pending ->
      printf("node %d: gives its call up, which is still on the way\n", id);
      pending = true; copy(late, me.aboard);
      giveUp(me); done()
    }
  :: d_step { true -> /* and starts again */
      printf("node %d: crashes\n", id);
      crash(me); done()
    }
  :: d_step { me.call == sent && !pending ->
      printf("node %d: crashes, its call is still on the way\n", id);
      pending = true; copy(late, me.aboard);
      crash(me); done()
    }
  od
}

/* --- the clock ----------------------------------------------------------------- */

/* A tick on a node: leases past their deadline are returned, epochs age. */
inline tick(n) {
  i = 0;
  do
  :: i < AGE0 + 3 ->
    if
    :: i < AGES -> n.tally.returned[i] = n.tally.returned[i] + n.live[i * TTL]
    :: else
    fi;
    j = 1;
    do
    :: j < TTL -> n.live[i * TTL + j - 1] = n.live[i * TTL + j]; j++
    :: else -> break
    od;
    n.live[i * TTL + TTL - 1] = 0;
    i++
  :: else -> break
  od;
  n.life = (n.life > 0 -> n.life - 1 : 0);
#ifdef KEEP
  j = 1;
  do
  :: j < TTL -> n.kept[j - 1] = n.kept[j]; j++
  :: else -> break
  od;
  n.kept[TTL - 1] = 0;
#endif
  if
  :: ended ->
    j = 0;
    do
    :: j < TTL ->
      k = KINDS - TTL + j;
      n.live[k] = n.live[k] + n.live[k - TTL];
      k = k - TTL;
      do
      :: k >= TTL -> n.live[k] = n.live[k - TTL]; k = k - TTL
      :: else -> break
      od;
      n.live[j] = 0;
      j++
    :: else -> break
    od;
    older(n.tally); older(n.aboard);
    n.age = (n.granted > 0 && n.age < AGE0 + 2 -> n.age + 1 : n.age)
  :: else
  fi
}

#ifdef EXPIRE_EARLY
#define EXPIRY (FULL - b)
#else
#define EXPIRY (FULL - b + 2 * TTL)
#endif

#ifdef FOLD
byte backs;
#define MAY_GO_BACK (backs < 1) /* once is enough to break it, and easier to follow */
#else
#define MAY_GO_BACK (phase > -TTL && lag > -TTL)
#endif

proctype clock() {
  do
  :: d_step {
      printf("clock: ticks\n");
      level = (level > 0 -> level - 1 : 0);

      /* The bucket by now, one tick at a time. */
      nowB = (lag >= 0 && ROOM(nowB, now0, now1) > 0 -> nowB + 1 : nowB);
      phase++;
      if
      :: phase == TTL ->
        phase = 0; ended = true;
        now1 = OLDER(now0); now0 = 0;
        older(late)
      :: else
      fi;
      tick(node[0]);
#if NODES > 1
      tick(node[1]);
#endif
#if NODES > 2
      tick(node[2]);
#endif

      /* A full bucket is as good as none. */
      lag = (missing -> 0 : lag + 1);
      if
      :: lag > 0 && lag >= EXPIRY -> /* the key expires */
#if !defined(PROMISE) && !defined(BACK)
        assert(nowB == FULL && now0 + now1 == 0); /* nobody can tell */
#endif
        b = FULL; out0 = 0; out1 = 0; lag = 0;
#ifdef BACK
        missing = true;
        forgetAll();
#endif
        nowB = FULL; now0 = 0; now1 = 0
      :: else
      fi;
      phaseThen = (missing -> 0 : phaseThen);
      done()
    }
#ifdef BACK
  :: d_step { MAY_GO_BACK ->
      printf("clock: goes back\n");
#ifdef FOLD
      backs++;
#endif
      lag = (missing -> 0 : lag - 1);
      phase--;
      if
      :: lag >= 0 ->
        if
        :: phase < 0 && (missing || phase != phaseThen + lag) -> phase = phase + TTL; youngerAll()
        :: else
        fi;
        load(); advance();
        nowB = xB; now0 = x0; now1 = x1
      :: else /* not before it was saved */
      fi;
      done()
    }
#endif
  od
}

init {
  atomic {
    i = 0;
    do
    :: i < NODES -> node[i].call = idle; run server(i); i++
    :: else -> break
    od;
    i = 0;
    run store(); run clock()
  }
}
