//! An idle stream, which measures how long a stream takes to begin.

use std::time::{Duration, Instant};

use highwater_hal::{Backend, Result};

use crate::device::{Block, Stream};

const BYTES: usize = 1 << 16;

/// A stream with a small buffer of its own.
#[derive(Debug)]
pub(crate) struct IdleStream<'b> {
    stream: Stream<'b>,
    block: Block<'b>,
}

impl<'b> IdleStream<'b> {
    /// On a loaded machine, one stream may begin later than another.
    const AT_LEAST: Duration = Duration::from_millis(10);

    pub(crate) fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        Ok(Self { stream: Stream::on(backend, device)?, block: Block::on(backend, device, BYTES)? })
    }

    /// Waits at least three times as long as this stream needs for a fill. A stream that should wait for an event and does not
    /// has then run ahead.
    pub(crate) fn let_others_begin(&self) -> Result<()> {
        let called = Instant::now();
        self.stream.set(self.block.all(), 1)?;
        self.stream.synchronize()?;
        std::thread::sleep(Self::AT_LEAST.max(called.elapsed() * 3));
        Ok(())
    }
}
