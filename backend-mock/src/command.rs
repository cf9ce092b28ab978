//! The commands that streams execute.

use std::sync::Arc;
use std::time::Instant;

use highwater_hal::{CopyShape, HostPtr};

use crate::device::{Device, Retired};
use crate::event::Point;
use crate::kernel::{Panel, Product};
use crate::observer::Origin;
use crate::shared_event::Progress;

/// One operation of a stream. Offsets are bytes from the start of a device's memory.
#[derive(Debug, Clone)]
pub(crate) enum Command {
    CopyToDevice {
        src: HostPtr,
        dst: usize,
        shape: CopyShape,
        device: u32,
    },
    CopyToHost {
        src: usize,
        dst: HostPtr,
        shape: CopyShape,
        device: u32,
    },
    CopyOnDevices {
        src: usize,
        src_device: u32,
        dst: usize,
        dst_device: u32,
        shape: CopyShape,
    },
    Fill {
        device: u32,
        dst: usize,
        bytes: usize,
        pattern: u64,
    },
    Record(Arc<Point>),
    Wait(Arc<Point>),
    /// Gives back the bytes of a block that was freed in stream order.
    Release(Retired),
    /// The first half of a product, into the workspace.
    Multiply(Arc<Product>, Panel),
    /// The second half, from the workspace to the result.
    Finish(Arc<Product>, Panel),
    /// Both halves at once, for a product without space for intermediate results.
    MultiplyAndFinish(Arc<Product>),
    /// Runs code of the host.
    #[cfg(feature = "simulated")]
    Call(Call),
    #[cfg(test)]
    Panic,
}

/// A command, with the call that enqueued it if an observer wants to know.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) command: Command,
    pub(crate) origin: Option<Arc<Origin>>,
}

impl Step {
    /// Creates a step of a command that touches no memory.
    pub(crate) fn nameless(command: Command) -> Self {
        Self { command, origin: None }
    }
}

/// A point that the stream has reached. It is published together with the count of completed commands.
pub(crate) type Settled = Option<(Arc<Point>, Progress)>;

impl Command {
    pub(crate) fn execute(self, devices: &[Arc<Device>], device: &Device) -> Settled {
        let memory = |ordinal: u32| &devices[ordinal as usize].memory;
        match self {
            Self::CopyToDevice { src, dst, shape, device } => shape.rows().for_each(|(to, from)| {
                // SAFETY: the caller of `copy` promised that the host block stays allocated and is not written until the
                // copy has completed. The rows were found inside a page-locked block.
                unsafe { memory(device).write(dst + to, src.offset(from).as_ptr(), shape.width) };
            }),
            Self::CopyToHost { src, dst, shape, device } => shape.rows().for_each(|(to, from)| {
                // SAFETY: as above; and no other code reads or writes the destination.
                unsafe { memory(device).read(src + from, dst.offset(to).as_ptr(), shape.width) };
            }),
            Self::CopyOnDevices { src, src_device, dst, dst_device, shape } => shape.rows().for_each(|(to, from)| {
                memory(dst_device).copy_from(dst + to, memory(src_device), src + from, shape.width);
            }),
            Self::Fill { device, dst, bytes, pattern } => memory(device).fill(dst, bytes, pattern),
            Self::Record(point) => return Some((point, Progress::Reached(Instant::now()))),
            Self::Wait(point) => {
                if point.wait().is_none() {
                    // The work that should come before never will, and later work relies on it.
                    device.lose();
                }
            }
            Self::Release(block) => device.release(block),
            Self::Multiply(product, panel) => product.multiply(memory(product.device), panel),
            Self::Finish(product, panel) => product.finish(memory(product.device), panel),
            Self::MultiplyAndFinish(product) => product.multiply_and_finish(memory(product.device)),
            #[cfg(feature = "simulated")]
            Self::Call(call) => call.run(),
            #[cfg(test)]
            Self::Panic => panic!("a command that panics, as the test asked"),
        }
        None
    }

    /// Does the rest of a command that the loss of the device overtook.
    pub(crate) fn give_up(self, device: &Device) -> Settled {
        match self {
            Self::Record(point) => return Some((point, Progress::Lost)),
            Self::Release(block) => device.release(block),
            _ => {}
        }
        None
    }
}

/// Code that a stream's worker runs when the stream gets there. A graph that recorded it runs it once per launch.
#[cfg(feature = "simulated")]
#[derive(Clone)]
pub struct Call(Arc<dyn Fn() + Send + Sync>);

#[cfg(feature = "simulated")]
impl Call {
    /// Wraps the code. The code must not wait for the stream that it runs on.
    #[must_use]
    pub fn new(code: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(code))
    }

    pub(crate) fn run(&self) {
        (self.0)();
    }
}

#[cfg(feature = "simulated")]
impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Call")
    }
}
