//! Held streams: a stream executes its work when a call waits for it or a test releases it, and not before.
//!
//! There are no workers. A wait executes, on the caller's thread, the commands that come before its goal. Those are the
//! earlier commands of the same stream, and the commands of other streams that they wait for. A query executes only
//! records that nothing held comes before, so an event on an idle stream is reached at once.
//!
//! Locks: `execution`, then a stream's queue, then the list. The thread that executes commands holds `execution`.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, ReentrantMutex};

use crate::engine::{Goal, Scheduler};
use crate::event::Point;
use crate::stream::Stream;

/// The time that a wait sleeps if another thread or another process must come first.
const NAP: Duration = Duration::from_micros(200);

#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Held by the thread that executes, and again by what it executes.
    execution: ReentrantMutex<()>,
    /// The streams that have work.
    streams: Mutex<Vec<Arc<Stream>>>,
}

impl Held {
    fn find(&self, is_it: impl Fn(&Stream) -> bool) -> Option<Arc<Stream>> {
        let streams = self.streams.lock().clone();
        streams.into_iter().find(|stream| is_it(stream))
    }

    fn recorder(&self, point: &Point) -> Option<Arc<Stream>> {
        self.find(|stream| stream.will_record(point))
    }

    /// Executes the next command of a stream, or of the stream that it waits for. Returns false if nothing can go on.
    fn step(&self, stream: &Stream) -> bool {
        match stream.awaited() {
            Some(point) => self.recorder(&point).is_some_and(|other| self.step(&other)),
            None => stream.execute_one(),
        }
    }
}

impl Scheduler for Held {
    fn add(&self, stream: &Arc<Stream>) {
        self.streams.lock().push(Arc::clone(stream));
    }

    fn remove(&self, stream: &Stream) {
        let mut streams = self.streams.lock();
        let index = streams.iter().position(|other| std::ptr::eq(&**other, stream));
        let removed = index.map(|index| streams.remove(index));
        drop(streams);
        drop(removed);
    }

    fn queried(&self) {
        let _executing = self.execution.lock();
        while let Some(stream) = self.find(Stream::is_at_record) {
            stream.execute_one();
        }
    }

    fn wait(&self, goal: Goal<'_>, is_done: &dyn Fn() -> bool) {
        while !is_done() {
            let executing = self.execution.lock();
            let stream = match goal {
                Goal::Stream(stream) => self.find(|other| std::ptr::eq(other, stream)),
                Goal::Point(point) => self.recorder(point),
            };
            // Another thread may have executed the last command meanwhile.
            let is_stuck = !is_done() && !stream.is_some_and(|stream| self.step(&stream));
            drop(executing);
            if is_stuck {
                std::thread::sleep(NAP);
            }
        }
    }

    fn finish(&self) {
        while let Some(stream) = self.find(|stream| stream.can_go_on(true)) {
            let _executing = self.execution.lock();
            stream.execute_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use highwater_hal::{
        AllocateOptions, Backend, Completion, DevicePtr, EventOptions, FillPattern, Location, MemoryFill, StreamId,
        StreamOptions,
    };

    use crate::{MockGpu, MockOptions};

    fn fill(gpu: &MockGpu, ptr: DevicePtr, stream: StreamId) {
        // SAFETY: the block holds 8 bytes, and the mock orders its own executions.
        unsafe { gpu.fill(&MemoryFill::new(0, ptr, FillPattern::U8(1), 8), stream) }.unwrap();
    }

    #[test]
    fn a_held_stream_executes_what_a_wait_needs_and_no_more() {
        let gpu = MockGpu::open(MockOptions::new().with_held_streams().with_checks()).unwrap();
        let streams = [(); 3].map(|()| gpu.create_stream(0, &StreamOptions::new()).unwrap());
        let blocks = [(); 3].map(|()| gpu.allocate(0, &AllocateOptions::new(8)).unwrap());
        let in_use = || blocks.map(|ptr| gpu.is_in_use(Location::Device { device: 0, ptr }));
        let [early, late] = [(); 2].map(|()| gpu.create_event(0, &EventOptions::new()).unwrap());
        gpu.record_event(early, streams[0]).unwrap();
        assert_eq!(gpu.query_event(early).unwrap(), Completion::Complete, "nothing comes before it");
        fill(&gpu, blocks[0], streams[0]);
        gpu.record_event(early, streams[0]).unwrap();
        fill(&gpu, blocks[1], streams[0]);
        gpu.stream_wait_event(streams[1], early).unwrap();
        gpu.record_event(late, streams[1]).unwrap();
        fill(&gpu, blocks[2], streams[2]);
        assert_eq!(gpu.query_event(late).unwrap(), Completion::Pending);
        assert_eq!(in_use(), [true; 3]);
        gpu.synchronize_event(late).unwrap();
        assert_eq!(in_use(), [false, true, true], "only the work before the event that the other stream awaits");
        gpu.release_stream(streams[2]).unwrap();
        assert_eq!(in_use(), [false, true, false]);
        gpu.synchronize_device(0).unwrap();
        assert_eq!(in_use(), [false; 3]);
        // The end of the mock executes the rest.
        fill(&gpu, blocks[0], streams[0]);
    }

    #[test]
    fn memory_is_recorded_while_an_executable_graph_has_it() {
        let gpu = MockGpu::open(MockOptions::new().with_held_streams().with_checks()).unwrap();
        let stream = gpu.create_stream(0, &StreamOptions::new()).unwrap();
        let ptr = gpu.allocate(0, &AllocateOptions::new(8)).unwrap();
        let at = |bytes| Location::Device { device: 0, ptr: ptr.offset(bytes) };
        gpu.begin_capture(stream, highwater_hal::CaptureMode::Relaxed).unwrap();
        fill(&gpu, ptr, stream);
        // SAFETY: the block stays allocated.
        let graph = unsafe { gpu.end_capture(stream) }.unwrap();
        assert!(!gpu.is_recorded(at(0)), "the graph cannot be launched");
        let executable = gpu.instantiate_graph(graph).unwrap();
        assert_eq!([0, 7, 8].map(|bytes| gpu.is_recorded(at(bytes))), [true, true, false]);
        assert!(!gpu.is_in_use(at(0)));
        gpu.destroy_graph_exec(executable).unwrap();
        assert!(!gpu.is_recorded(at(0)));
    }

    #[test]
    fn a_schedule_and_held_streams_exclude_each_other() {
        assert!(MockGpu::open(MockOptions::new().with_held_streams().with_schedule(1)).is_err());
    }
}
