//! Sharing between real processes, on the mock.

mod adopted;
mod batches;
mod containers;
mod faults;
mod graphs;
mod hand_over;
mod heirs;
mod hostile;
mod kills;
mod lives;
mod owners;
mod peer;
mod pinned;
mod promises;
mod properties;
mod review;

use std::sync::Arc;

use highwater_core::{DeviceBuffer, ErrorKind, Runtime, Stream, Ticket};
use highwater_mock::{MockGpu, MockOptions};

/// Not a test by itself: what the other processes of these tests run.
#[test]
fn obey() {
    peer::obey();
}

/// An exporter in this process.
struct Exporter {
    gpu: Arc<MockGpu>,
    runtime: Runtime,
    stream: Stream,
    /// Free memory of the device at the beginning.
    free: u64,
}

impl Exporter {
    fn new() -> Self {
        Self::with(MockOptions::new())
    }

    fn with(options: MockOptions) -> Self {
        let gpu = MockGpu::open(options).unwrap();
        let runtime = Runtime::new(gpu.clone()).unwrap();
        let device = runtime.device(0).unwrap();
        let stream = device.create_stream().unwrap();
        let free = device.memory_info().unwrap().free;
        Self { gpu, runtime, stream, free }
    }

    fn make(&self, len: usize, value: u32) -> DeviceBuffer<u32> {
        let buffer = self.runtime.device(0).unwrap().allocate_shared::<u32>(len).unwrap();
        self.stream.fill(&buffer, value).unwrap();
        buffer
    }

    /// Makes a buffer and shares it.
    fn make_shared(&self, len: usize, value: u32) -> (DeviceBuffer<u32>, Ticket) {
        let buffer = self.make(len, value);
        let ticket = buffer.share().unwrap();
        (buffer, ticket)
    }

    /// Bytes that are allocated and were not at the beginning.
    fn taken(&self) -> u64 {
        self.runtime.trim_device_memory().unwrap();
        self.free - self.runtime.device(0).unwrap().memory_info().unwrap().free
    }

    /// Opens a ticket, which is refused with this kind of error.
    fn refusal(&self, ticket: &Ticket) -> ErrorKind {
        self.runtime.open_shared::<u32>(ticket).map(drop).unwrap_err().kind()
    }

    /// Drops these objects, and ends.
    fn end_after<T>(self, objects: T) {
        drop(objects);
        self.end();
    }

    /// Waits until other processes have given all memory back, and ends.
    #[track_caller]
    fn end_once_all_is_back(self) {
        peer::until("the memory is back", || self.taken() == 0);
        self.end();
    }

    /// The end: nothing is left.
    fn end(self) {
        drop(self.stream);
        let live = self.runtime.close().unwrap();
        assert_eq!(live.total(), 0, "{live:?}");
    }
}
