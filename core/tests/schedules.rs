//! Schedules of threads that chance hardly ever makes, forced by a backend that runs something around one of its calls.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use highwater_core::{Answer, Backend, BackendLayer, Call, Result, Runtime};
use highwater_mock::{MockGpu, MockOptions};

/// Something to run once, in another thread.
type Hook = Mutex<Option<Box<dyn FnOnce() + Send>>>;

struct Hooked {
    gpu: Arc<MockGpu>,
    after_synchronize_event: Hook,
    before_stream_wait_event: Hook,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").field("gpu", &self.gpu).finish_non_exhaustive()
    }
}

fn run(hook: &Hook) {
    let hook = hook.lock().unwrap().take();
    if let Some(hook) = hook {
        thread::spawn(hook).join().unwrap();
    }
}

// SAFETY: everything is passed on to the mock.
unsafe impl BackendLayer for Hooked {
    fn below(&self) -> &dyn Backend {
        &*self.gpu
    }
    fn around<T: Answer>(&self, call: &Call, forward: impl FnOnce(&dyn Backend) -> Result<T>) -> Result<T> {
        if call.operation == "stream_wait_event" {
            run(&self.before_stream_wait_event);
        }
        let answer = forward(self.below());
        if call.operation == "synchronize_event" {
            run(&self.after_synchronize_event);
        }
        answer
    }
}

fn open() -> (Arc<Hooked>, Runtime) {
    let gpu = MockGpu::open(MockOptions::new()).unwrap();
    let hooked =
        Arc::new(Hooked { gpu, after_synchronize_event: Hook::default(), before_stream_wait_event: Hook::default() });
    (hooked.clone(), Runtime::new(hooked).unwrap())
}

#[test]
fn a_reader_does_not_forget_a_use_that_came_while_it_waited() {
    let (hooked, runtime) = open();
    let device = runtime.device(0).unwrap();
    let (writer, reader) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let buffer = Arc::new(device.allocate::<u8>(64).unwrap());
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    writer.copy_to_host(&*buffer, &mut pinned).unwrap();
    let pinned = Arc::new(pinned);
    let (same, stream, target, gpu) = (pinned.clone(), reader.clone(), buffer.clone(), hooked.gpu.clone());
    // Another thread, between "the mark is passed" and "its use is struck out" of the first one: the event of the use that
    // it strikes out itself would be the next to be recorded.
    *hooked.after_synchronize_event.lock().unwrap() = Some(Box::new(move || {
        same.read().unwrap();
        gpu.set_latency(Duration::from_millis(100));
        stream.copy_to_device(&*same, &*target).unwrap();
    }));
    pinned.read().unwrap();
    let mut pinned = Arc::try_unwrap(pinned).unwrap();
    pinned.write().unwrap().fill(1);
    assert!(reader.is_complete().unwrap(), "the memory was given out while the second stream still read it");
}

#[test]
fn a_copy_waits_for_the_write_it_would_race_with_although_that_use_was_marked_anew() {
    let (hooked, runtime) = open();
    let device = runtime.device(0).unwrap();
    let [writer, reader, third] = std::array::from_fn(|_| device.create_stream().unwrap());
    let [source, target, other] = std::array::from_fn(|_| Arc::new(device.allocate::<u8>(64).unwrap()));
    let mut pinned = runtime.pinned::<u8>(64).unwrap();
    pinned.write().unwrap().fill(0);
    hooked.gpu.set_latency(Duration::from_millis(5));
    for _ in 0..20 {
        writer.fill(&*source, 9).unwrap();
    }
    writer.copy_to_host(&*source, &mut pinned).unwrap();
    let pinned = Arc::new(pinned);
    let (same, stream, aside) = (pinned.clone(), writer.clone(), other.clone());
    // While the reader is about to wait for the writer's mark: a new mark takes its place, and a third stream takes
    // whatever event is free.
    *hooked.before_stream_wait_event.lock().unwrap() = Some(Box::new(move || {
        stream.copy_to_device(&*same, &*aside).unwrap();
        std::mem::forget(third.record().unwrap());
    }));
    reader.copy_to_device(&*pinned, &*target).unwrap();
    assert_eq!(reader.download(&*target).unwrap(), [9; 64], "the copy read the memory before it was written");
}
