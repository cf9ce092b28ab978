//! Keeps a stream busy for a known time on any device, with nothing but copies, and tries again with more work where
//! the time was too short.
//!
//! A promise such as "does not wait" can only be seen while there is something to wait for. How long a copy takes is
//! the device's affair, so the work is measured first and made long enough; and since the machine may be slow just when
//! it matters, an attempt that came too late proves nothing and is made again with more work.

use std::time::{Duration, Instant};

use highwater_core::{Backend, Result};

use crate::case::{CaseResult, Failure};
use crate::device::{Block, Pinned, Stream};

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
    pub(crate) const TIME: Duration = Duration::from_millis(20);

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
        const MEASURED: usize = 3;
        let (block, pinned) = (Block::on(backend, device, bytes)?, Pinned::new(backend, bytes)?);
        let mut busy = Self { block, pinned, direction, copies: 1 };
        let stream = Stream::on(backend, device)?;
        // The first copy touches the memory and wakes the device up; those after it are the measure.
        busy.run_once(&stream)?;
        busy.copies = MEASURED;
        let taken = busy.run_once(&stream)?.as_nanos().max(1);
        Ok((busy, (Self::TIME.as_nanos() * MEASURED as u128).div_ceil(taken)))
    }

    fn run_once(&self, stream: &Stream<'_>) -> Result<Duration> {
        let started = Instant::now();
        self.enqueue(stream, 1)?;
        stream.synchronize()?;
        Ok(started.elapsed())
    }

    /// Enqueues `helpings` times the work.
    pub(crate) fn enqueue(&self, stream: &Stream<'_>, helpings: usize) -> Result<()> {
        let (dst, src) = match self.direction {
            Direction::ToDevice => (self.block.all(), self.pinned.all()),
            Direction::ToHost => (self.pinned.all(), self.block.all()),
        };
        (0..self.copies * helpings).try_for_each(|_| stream.copy(dst, src))
    }
}

/// What an attempt came to, where it found nothing wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// The work was still outstanding when it mattered: the attempt proves something.
    InTime,
    /// The work was over too early: the attempt proves nothing.
    TooLate,
}

impl Attempt {
    /// In time if the work was seen outstanding.
    pub(crate) fn seen(outstanding: bool) -> Self {
        if outstanding { Self::InTime } else { Self::TooLate }
    }
}

/// Makes the attempt with growing helpings of work until one is in time.
///
/// `waits` says what the backend seems to do if none is: work that is over each time means that a call waited for it.
pub(crate) fn attempts(waits: &str, mut attempt: impl FnMut(usize) -> Result<Attempt, Failure>) -> CaseResult {
    const HELPINGS: [usize; 4] = [1, 2, 4, 8];
    for helpings in HELPINGS {
        if attempt(helpings)? == Attempt::InTime {
            return Ok(());
        }
    }
    let longest = Busy::TIME * HELPINGS[HELPINGS.len() - 1] as u32;
    Err(Failure::new(format!(
        "{waits}: the work that was enqueued before (up to {} ms of it) was over in each of {} attempts",
        longest.as_millis(),
        HELPINGS.len()
    )))
}
