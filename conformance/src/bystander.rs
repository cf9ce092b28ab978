//! A stream that waits for nothing, to see how long it takes a stream to begin.

use std::time::{Duration, Instant};

use highwater_hal::{Backend, Result};

use crate::device::{Block, Stream};

const BYTES: usize = 1 << 16;

/// A stream with a little work of its own.
#[derive(Debug)]
pub(crate) struct Bystander<'b> {
    stream: Stream<'b>,
    block: Block<'b>,
}

impl<'b> Bystander<'b> {
    /// A stream of a busy machine may begin later than another.
    const AT_LEAST: Duration = Duration::from_millis(15);

    pub(crate) fn on(backend: &'b dyn Backend, device: u32) -> Result<Self> {
        Ok(Self { stream: Stream::on(backend, device)?, block: Block::on(backend, device, BYTES)? })
    }

    /// Gives streams that were given work before a good deal more time to begin than this one needs. One that was to
    /// wait and does not has gone ahead by then.
    pub(crate) fn let_others_begin(&self) -> Result<()> {
        let called = Instant::now();
        self.stream.set(self.block.all(), 1)?;
        self.stream.synchronize()?;
        std::thread::sleep(Self::AT_LEAST.max(called.elapsed() * 3));
        Ok(())
    }
}
