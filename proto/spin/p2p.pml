/* XCCL send/receive between two dies: one lane, a ring of two slots, three chunks.
 *
 * The fabric loses, doubles and delays single remote writes. One of the dies may crash once and
 * come back in a new epoch with an empty mind and a dirty memory. A chunk does not arrive in one
 * piece: its header and its payload land in separate steps, in either order.
 *
 * What is checked, in every interleaving:
 *   - a chunk is delivered as it was sent in this epoch, in order (no torn and no stale slot);
 *   - nothing lands in a slot before its earlier content is consumed (no reuse before ACK);
 *   - a sender that is through has a receiver that has everything.
 *
 * Each flag takes one protection away, and must give a counterexample:
 *   -DNO_DATA_FENCE   the tail does not wait for the data in front of it
 *   -DNO_ACK_FENCE    the ACK is written before the slot has been copied
 *   -DNO_GENERATION   neither landing nor reading asks what a slot is open for, or holds
 *   -DNO_ATTEMPT      a slot that was written again is read under the tail of the first attempt
 * and -DREACHABLE asserts that no transfer ever ends, which must fail as well: the model is not
 * true because nothing happens in it.
 */

#define SLOTS    2
#define CHUNKS   3
#define ATTEMPTS 2    /* the first, and one repetition per epoch */
#ifndef DOUBLES
#define DOUBLES  1    /* late copies in one run */
#endif
#define VALUE(epoch, position) ((epoch) * 4 + (position) + 1)

/* Writes under way. `late_*` hold what lands a second time, at any time, past every fence. */
chan data      = [1] of { byte, byte, byte };   /* epoch, position, attempt */
chan late_data = [1] of { byte, byte, byte };
chan tail      = [1] of { byte, byte, byte };   /* epoch, chunks published, attempt */
chan late_tail = [1] of { byte, byte, byte };
chan ack       = [1] of { byte, byte };         /* epoch, chunks consumed */
chan late_ack  = [1] of { byte, byte };

/* The receiver's memory: it survives a crash of its die with whatever lies in it. */
byte held_epoch[SLOTS], held_position[SLOTS], held_attempt[SLOTS], payload[SLOTS];
byte landing[SLOTS];    /* writes between their first and their last word */
bool first_landing;     /* one of them is not a late copy: what a fence waits for */

/* The two ends. */
byte send_epoch = 1, written, stored, acked, published, attempt;
byte receive_epoch = 1, consumed, tail_chunks, tail_attempt;
byte crashes, doubles;
bool copying;

#ifdef NO_DATA_FENCE
#define FENCED true
#else
#define FENCED (empty(data) && !first_landing)
#endif

inline reset_sender(epoch) {
    send_epoch = epoch; written = 0; stored = 0; acked = 0; published = 0; attempt = 0
}

inline reset_receiver(epoch) {
    receive_epoch = epoch; consumed = 0; tail_chunks = 0; tail_attempt = 0; copying = false
}

/* A write of a later epoch is proof that its sender lives anew. It waits while an older write is
 * landing: an epoch ends, like a generation, only between writes. */
#define QUIET (landing[0] == 0 && landing[1] == 0)
inline adopt(epoch) {
    if
    :: epoch > receive_epoch && QUIET -> reset_receiver(epoch)
    :: else
    fi
}

/* ------------------------------------------------------------------ the sending die */

active proctype Sender() {
    byte e, c;
end:
    do
    /* Steps 1 and 2: store the next chunk into a slot whose last content is acknowledged. */
    :: atomic { stored < CHUNKS && stored < acked + SLOTS && nfull(data) ->
           data ! send_epoch, stored, attempt;
           stored++;
           if :: stored > written -> written = stored :: else fi }
    /* Step 3: a fence, then the tail. */
    :: atomic { published < stored && FENCED && nfull(tail) ->
           tail ! send_epoch, stored, attempt;
           published = stored }
    /* Steps 4 and 8: the ACK. */
    :: atomic { ack ? e, c ->
           if :: doubles < DOUBLES && nfull(late_ack) -> doubles++; late_ack ! e, c :: true fi;
           if
           :: e == send_epoch && c > acked && c <= written ->
               acked = c;
               if :: stored < acked -> stored = acked :: else fi;
               if :: published < acked -> published = acked :: else fi
           :: else
           fi;
           e = 0; c = 0 }
    :: atomic { late_ack ? e, c ->
           if
           :: e == send_epoch && c > acked && c <= written ->
               acked = c;
               if :: stored < acked -> stored = acked :: else fi;
               if :: published < acked -> published = acked :: else fi
           :: else
           fi;
           e = 0; c = 0 }
    /* A wait without progress: everything unacknowledged again, under the next attempt. */
    :: atomic { acked < written && attempt < ATTEMPTS - 1 ->
           attempt++; stored = acked; published = acked }
    /* It learns that the receiver lives anew, and its engine sends again. */
    :: atomic { receive_epoch > send_epoch -> reset_sender(receive_epoch) }
    :: atomic { crashes == 0 -> crashes++; reset_sender(send_epoch + 1) }
    :: d_step { acked == CHUNKS && send_epoch == receive_epoch ->
           assert(consumed == CHUNKS);
#ifdef REACHABLE
           assert(false);
#endif
           skip } -> break
    od
}

/* ------------------------------------------------------------------ the fabric and the memory */

inline land(e, p, a, original) {
    /* The judgement and the first word are one step; so is the end of a generation. */
    if
#ifndef NO_GENERATION
    :: e != receive_epoch || p < consumed -> e = 0    /* refused */
    :: e == receive_epoch && p >= consumed ->
        assert(p < consumed + SLOTS);
#else
    :: true ->
#endif
        landing[p % SLOTS]++;
        first_landing = (original -> true : first_landing)
    fi
}

inline write_header(e, p, a) {
    d_step { held_epoch[p % SLOTS] = e; held_position[p % SLOTS] = p; held_attempt[p % SLOTS] = a }
}

inline write_words(e, p, a) {
    if
    :: e == 0
    :: e != 0 ->
        if
        :: write_header(e, p, a); payload[p % SLOTS] = VALUE(e, p)
        :: payload[p % SLOTS] = VALUE(e, p); write_header(e, p, a)
        fi
    fi
}

active proctype Fabric() {
    byte e, p, a;
end:
    do
    :: atomic { data ? < e, p, a > ->
           (e <= receive_epoch || QUIET);
           data ? _, _, _;
           adopt(e);
           if :: doubles < DOUBLES && nfull(late_data) -> doubles++; late_data ! e, p, a
              :: true fi;
           land(e, p, a, true) };
       write_words(e, p, a);
       d_step { if :: e != 0 -> landing[p % SLOTS]--; first_landing = false :: else fi;
                e = 0; p = 0; a = 0 }
    :: data ? _, _, _                   /* lost */
    :: tail ? _, _, _
    :: ack ? _, _
    od
}

active proctype Late() {
    byte e, p, a;
end:
    do
    :: atomic { late_data ? e, p, a -> adopt(e); land(e, p, a, false) };
       write_words(e, p, a);
       d_step { if :: e != 0 -> landing[p % SLOTS]-- :: else fi; e = 0; p = 0; a = 0 }
    :: late_data ? _, _, _
    :: late_tail ? _, _, _
    :: late_ack ? _, _
    od
}

/* ------------------------------------------------------------------ the receiving die */

inline hear(e, c, a) {
    adopt(e);
    if
    :: e == receive_epoch && (a > tail_attempt || (a == tail_attempt && c > tail_chunks)) ->
        tail_attempt = a; tail_chunks = c
    :: else
    fi;
    /* What the sender repeats has been consumed: its ACK was lost. */
    if
    :: e == receive_epoch && c <= consumed && nfull(ack) -> ack ! e, consumed
    :: true    /* or that is lost, too */
    fi;
    e = 0; c = 0; a = 0
}

#define SLOT (consumed % SLOTS)
#ifdef NO_GENERATION
#define BELIEVED true
#define CLOSABLE true
#else
/* A slot is believed under a tail of at least its own attempt, and given back between writes. */
#ifdef NO_ATTEMPT
#define COVERED true
#else
#define COVERED (held_attempt[SLOT] <= tail_attempt)
#endif
#define BELIEVED (held_epoch[SLOT] == receive_epoch && held_position[SLOT] == consumed && COVERED)
#define CLOSABLE (landing[SLOT] == 0)
#endif

active proctype Receiver() {
    byte e, c, a, got, wanted;
end:
    do
    :: atomic { tail ? e, c, a ->
           if :: doubles < DOUBLES && nfull(late_tail) -> doubles++; late_tail ! e, c, a
              :: true fi;
           hear(e, c, a) }
    :: atomic { late_tail ? e, c, a -> hear(e, c, a) }
#ifdef NO_ACK_FENCE
    :: atomic { !copying && consumed < tail_chunks && BELIEVED && CLOSABLE && nfull(ack) ->
           copying = true;
           consumed++;
           ack ! receive_epoch, consumed }
    :: atomic { copying ->
           assert(payload[(consumed - 1) % SLOTS] == VALUE(receive_epoch, consumed - 1));
           copying = false }
#else
    /* Steps 5 and 6: a tail that covers the next chunk, and a slot that holds it. */
    :: atomic { !copying && consumed < tail_chunks && BELIEVED ->
           copying = true; got = payload[SLOT]; wanted = VALUE(receive_epoch, consumed) }
    /* Step 7: the copy is over, the slot is given back, and only then acknowledged. */
    :: atomic { copying && CLOSABLE && nfull(ack) ->
           assert(got == wanted);
           copying = false; got = 0; wanted = 0;
           consumed++;
           ack ! receive_epoch, consumed }
#endif
    :: atomic { crashes == 0 && QUIET ->
           crashes++; reset_receiver(receive_epoch + 1); got = 0; wanted = 0 }
    /* It learns that the sender lives anew. */
    :: d_step { send_epoch > receive_epoch && QUIET ->
           reset_receiver(send_epoch); got = 0; wanted = 0 }
    od
}
