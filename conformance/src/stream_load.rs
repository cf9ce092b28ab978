//! Copies that keep a stream of any device busy for a known time.
//!
//! A case can observe that a call does not wait only while work is outstanding. The time of a copy depends on the device, so the
//! load is measured first.

use std::fmt;
use std::time::{Duration, Instant};

use highwater_hal::{Backend, Result};

use crate::device::{Block, DEVICE, Event, Pinned, Stream};
use crate::sweep::as_one;

/// The direction of the copies. Devices have one copy engine for each direction, so loads of different directions do not queue
/// for one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
}

/// Copies that occupy a stream for at least [`StreamLoad::TIME`].
#[derive(Debug)]
pub(crate) struct StreamLoad<'b> {
    block: Block<'b>,
    pinned: Pinned<'b>,
    direction: Direction,
    copies: usize,
}

impl<'b> StreamLoad<'b> {
    /// The measured time of the load, at least.
    pub(crate) const TIME: Duration = Duration::from_millis(5);

    /// The bytes of one copy. The load takes the first size for which a copy is long compared to the call that enqueues it.
    const BYTES: [usize; 3] = [1 << 20, 8 << 20, 64 << 20];

    /// Vendors queue about 1,000 operations; after that, the enqueueing call waits.
    const MOST_COPIES: u128 = 400;

    pub(crate) fn new(backend: &'b dyn Backend, device: u32, direction: Direction) -> Result<Self> {
        let [small, larger @ ..] = Self::BYTES;
        let (mut busy, mut needed) = Self::measured(backend, device, direction, small)?;
        for bytes in larger {
            if needed > Self::MOST_COPIES {
                (busy, needed) = Self::measured(backend, device, direction, bytes)?;
            }
        }
        busy.copies = needed.clamp(1, Self::MOST_COPIES) as usize;
        Ok(busy)
    }

    /// Allocates memory for copies of this size, and measures how many take [`StreamLoad::TIME`].
    fn measured(backend: &'b dyn Backend, device: u32, direction: Direction, bytes: usize) -> Result<(Self, u128)> {
        const MEASURED: usize = 2;
        const ROUNDS: usize = 7;
        const AGREEING: usize = 3;
        let (block, pinned) = (Block::on(backend, device, bytes)?, Pinned::new(backend, bytes)?);
        let mut busy = Self { block, pinned, direction, copies: 1 };
        let stream = Stream::on(backend, device)?;
        // The first copy touches the memory and wakes the device; the later ones are measured.
        busy.run_once(&stream)?;
        busy.copies = MEASURED;
        // Preemption makes a round look long, and no effect makes it look short. So the shortest round counts, once others
        // are close to it. A time that is measured too long results in too little work.
        let mut rounds = Vec::with_capacity(ROUNDS);
        while rounds.len() < ROUNDS && rounds.get(AGREEING - 1).is_none_or(|&taken| taken > rounds[0] * 9 / 8) {
            rounds.push(busy.run_once(&stream)?);
            rounds.sort_unstable();
        }
        let taken = rounds[0].as_nanos().max(1);
        Ok((busy, (Self::TIME.as_nanos() * MEASURED as u128).div_ceil(taken)))
    }

    /// Returns whether a call that took this long waited for the work that was enqueued before, `load` times the load or more.
    ///
    /// The load may have been measured while the machine was busy, and so take less time than was measured. So the least time of
    /// a wait does not grow with the work. It stays above the time of a preemption.
    pub(crate) fn was_waited_for(load: usize, taken: Duration) -> bool {
        taken >= Self::TIME * load.min(2) as u32
    }

    fn run_once(&self, stream: &Stream<'_>) -> Result<Duration> {
        let started = Instant::now();
        self.enqueue(stream, 1)?;
        stream.synchronize()?;
        Ok(started.elapsed())
    }

    /// Enqueues the load `times` times. If the vendor's queue is full, the call waits for a part of the work and returns with a
    /// full queue outstanding.
    pub(crate) fn enqueue(&self, stream: &Stream<'_>, times: usize) -> Result<()> {
        self.enqueue_at_most(stream, times, usize::MAX).map(drop)
    }

    /// Enqueues the load `times` times, or as many of its copies. Returns the number of copies.
    pub(crate) fn enqueue_at_most(&self, stream: &Stream<'_>, times: usize, most: usize) -> Result<usize> {
        let (dst, src) = match self.direction {
            Direction::ToDevice => (self.block.all(), self.pinned.all()),
            Direction::ToHost => (self.pinned.all(), self.block.all()),
        };
        let copies = (self.copies * times).min(most);
        as_one(|| (0..copies).try_for_each(|_| stream.copy(dst, src)))?;
        Ok(copies)
    }
}

/// Evidence that calls execute their work instead of enqueueing it.
#[derive(Debug)]
pub(crate) struct InTheCall {
    copies: usize,
    /// The time until all copies were enqueued.
    enqueued: Duration,
    /// The time until all copies were complete.
    done: Duration,
}

impl fmt::Display for InTheCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |duration: &Duration| duration.as_secs_f64() * 1e3;
        let Self { copies, enqueued, done } = self;
        let (enqueued, done) = (ms(enqueued), ms(done));
        write!(
            f,
            "the call executes the work itself: {copies} copies took {enqueued:.1} ms to enqueue and {done:.1} ms to complete; \
             enqueue the work and return, and let a thread or the device execute it"
        )
    }
}

/// Returns whether the calls that should enqueue copies on device 0 execute them instead.
///
/// Such a call lasts as long as the work and leaves nothing to wait for. A preempted thread can make one round look
/// either way. So rounds are long, and the majority decides.
pub(crate) fn executes_in_the_call(backend: &dyn Backend) -> Result<Option<InTheCall>> {
    const ROUNDS: usize = 5;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let stream = Stream::new(backend)?;
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        busy.enqueue(&stream, 1)?;
        let enqueued = started.elapsed();
        stream.synchronize()?;
        rounds.push(InTheCall { copies: busy.copies, enqueued, done: started.elapsed() });
    }
    // A short queue makes calls wait too, but leaves some of the work outstanding.
    let share = |round: &InTheCall| round.enqueued.as_secs_f64() / round.done.as_secs_f64();
    rounds.sort_by(|a, b| share(a).total_cmp(&share(b)));
    Ok(rounds.into_iter().nth(ROUNDS / 2).filter(|median| share(median) > 0.95))
}

/// Returns evidence if a query reports work of device 0 as complete before its effect is visible.
pub(crate) fn completes_early(backend: &dyn Backend) -> Result<Option<String>> {
    const ROUNDS: u8 = 4;
    const BYTES: usize = 4096;
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    let (stream, event) = (Stream::new(backend)?, Event::new(backend)?);
    let (block, pinned) = (Block::new(backend, BYTES)?, Pinned::holding(backend, &[0; BYTES])?);
    let is_early = |says_complete: bool, round: u8| {
        // SAFETY: the backend says that the copy to this memory is complete.
        says_complete && unsafe { pinned.bytes_now(0..BYTES) }.iter().any(|&byte| byte != round)
    };
    for round in 1..=ROUNDS {
        busy.enqueue(&stream, usize::from(round))?;
        stream.set(block.all(), round)?;
        stream.copy(pinned.all(), block.all())?;
        stream.record(&event)?;
        let what = match () {
            () if is_early(event.query()?.is_complete(), round) => Some("an event"),
            () if is_early(stream.query()?.is_complete(), round) => Some("a stream"),
            () => None,
        };
        stream.synchronize()?;
        if let Some(what) = what {
            return Ok(Some(format!(
                "a query reports {what} as complete, and a copy to the host before it has not arrived; report `Pending` until the \
                 work has been executed"
            )));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_shows_although_the_load_was_measured_too_long() {
        // 128 times the load was enqueued, and took a third of the time that was measured.
        assert!(StreamLoad::was_waited_for(64, StreamLoad::TIME * 128 / 3));
        assert!(StreamLoad::was_waited_for(1, StreamLoad::TIME));
        // A preempted call.
        assert!(!StreamLoad::was_waited_for(64, StreamLoad::TIME * 3 / 2));
        assert!(!StreamLoad::was_waited_for(1, StreamLoad::TIME / 2));
    }
}
