//! Keeps a stream busy for a known time on any device, with nothing but copies.
//!
//! A promise such as "does not wait" can only be seen while there is something to wait for. How long a copy takes is
//! the device's affair, so the work is measured first and made long enough.

use std::fmt;
use std::time::{Duration, Instant};

use highwater_hal::{Backend, Result};

use crate::device::{Block, DEVICE, Pinned, Stream};
use crate::sweep::as_one;

/// Which way the copies go. Devices have an engine for each, so two streams that are busy in different directions do
/// not queue for one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
}

/// Work that occupies a stream for at least [`Busy::TIME`].
#[derive(Debug)]
pub(crate) struct Busy<'b> {
    block: Block<'b>,
    pinned: Pinned<'b>,
    direction: Direction,
    copies: usize,
}

impl<'b> Busy<'b> {
    /// How long one helping of work takes, at least, as measured.
    pub(crate) const TIME: Duration = Duration::from_millis(10);

    /// Bytes of one copy, the smallest first that makes the copy long beside the call that enqueues it.
    const BYTES: [usize; 3] = [1 << 20, 8 << 20, 64 << 20];

    /// Vendors queue about a thousand operations before the call that enqueues begins to wait.
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

    /// Memory for copies of that size, and how many of them take [`Busy::TIME`].
    fn measured(backend: &'b dyn Backend, device: u32, direction: Direction, bytes: usize) -> Result<(Self, u128)> {
        const MEASURED: usize = 2;
        const ROUNDS: usize = 7;
        const AGREEING: usize = 3;
        let (block, pinned) = (Block::on(backend, device, bytes)?, Pinned::new(backend, bytes)?);
        let mut busy = Self { block, pinned, direction, copies: 1 };
        let stream = Stream::on(backend, device)?;
        // The first copy touches the memory and wakes the device up; those after it are the measure.
        busy.run_once(&stream)?;
        busy.copies = MEASURED;
        // A thread that has to wait for a processor makes a round look long, by far more than it is, and nothing makes
        // one look short: the shortest counts, once others have come near it. What is measured too long comes out as
        // too little work.
        let mut rounds = Vec::with_capacity(ROUNDS);
        while rounds.len() < ROUNDS && rounds.get(AGREEING - 1).is_none_or(|&taken| taken > rounds[0] * 9 / 8) {
            rounds.push(busy.run_once(&stream)?);
            rounds.sort_unstable();
        }
        let taken = rounds[0].as_nanos().max(1);
        Ok((busy, (Self::TIME.as_nanos() * MEASURED as u128).div_ceil(taken)))
    }

    fn run_once(&self, stream: &Stream<'_>) -> Result<Duration> {
        let started = Instant::now();
        self.enqueue(stream, 1)?;
        stream.synchronize()?;
        Ok(started.elapsed())
    }

    /// Enqueues `helpings` times the work. Where that is more than the vendor's queue takes, the call waits for a part
    /// of it, and what is outstanding when it returns is a full queue.
    pub(crate) fn enqueue(&self, stream: &Stream<'_>, helpings: usize) -> Result<()> {
        let (dst, src) = match self.direction {
            Direction::ToDevice => (self.block.all(), self.pinned.all()),
            Direction::ToHost => (self.pinned.all(), self.block.all()),
        };
        as_one(|| (0..self.copies * helpings).try_for_each(|_| stream.copy(dst, src)))
    }
}

/// Calls that return when their work is done, although they should only enqueue it.
#[derive(Debug)]
pub(crate) struct InTheCall {
    copies: usize,
    /// The time to enqueue them.
    enqueued: Duration,
    /// The time until they were done.
    done: Duration,
}

impl fmt::Display for InTheCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |duration: &Duration| duration.as_secs_f64() * 1e3;
        let Self { copies, enqueued, done } = self;
        let (enqueued, done) = (ms(enqueued), ms(done));
        write!(
            f,
            "the call executes the work itself: {copies} copies took {enqueued:.1} ms to enqueue and {done:.1} ms until they \
             were done; enqueue the work and return, and let a thread or the device execute it"
        )
    }
}

/// Returns whether the calls that should enqueue copies on device 0 execute them instead.
///
/// Such a call lasts as long as the work and leaves nothing to wait for. A preempted thread can make one round look
/// either way. So rounds are long, and the majority decides.
pub(crate) fn executes_in_the_call(backend: &dyn Backend) -> Result<Option<InTheCall>> {
    const ROUNDS: usize = 5;
    let busy = Busy::new(backend, DEVICE, Direction::ToDevice)?;
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
