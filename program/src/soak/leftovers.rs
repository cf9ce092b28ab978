//! What a soak leaves in its own process and on its device.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::Runtime;
use highwater::hal::counted;
use highwater::mock::MockGpu;

use super::report::Reasons;
use super::{PATIENCE, descriptors};

/// The descriptors of this process and the free memory of its device, once every object of the first use exists.
#[derive(Debug, Clone, Copy)]
pub(super) struct Baseline {
    descriptors: usize,
    free: u64,
}

/// The descriptors and the bytes beyond a [`Baseline`], and the objects of a runtime that were alive at its end.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Left {
    pub(super) descriptors: u64,
    pub(super) bytes: u64,
    pub(super) objects: u64,
}

impl Left {
    /// Returns the counts with their nouns.
    pub(super) fn counted(&self) -> String {
        let Self { descriptors, bytes, objects } = *self;
        format!("{}, {}, {}", counted(bytes, "byte"), counted(objects, "object"), counted(descriptors, "descriptor"))
    }
}

impl Baseline {
    pub(super) fn new(free: u64) -> Result<Self> {
        Ok(Self { descriptors: descriptors()?, free })
    }

    /// Waits until nothing is left, within a limit. `free` returns the free memory of the device.
    pub(super) fn left(self, free: impl Fn() -> Result<u64>) -> Result<Left> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let descriptors = descriptors()?.saturating_sub(self.descriptors) as u64;
            let bytes = self.free.saturating_sub(free()?);
            if (descriptors, bytes) == (0, 0) || Instant::now() >= deadline {
                return Ok(Left { descriptors, bytes, objects: 0 });
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Closes a runtime, and returns its objects that are alive. Adds an error and the violations that the mock has found to `unexpected`.
pub(super) fn close(runtime: Runtime, mock: Option<Arc<MockGpu>>, unexpected: &mut Reasons) -> u64 {
    let objects = runtime.close().map_or_else(
        |error| {
            unexpected.add(error.to_string());
            0
        },
        |alive| alive.total(),
    );
    for violation in mock.iter().flat_map(|gpu| gpu.violations()) {
        unexpected.add(format!("found by the mock: {violation}"));
    }
    objects
}
