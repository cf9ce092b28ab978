//! The device memory that work allocates inside a capture. It belongs to the capture, and then to its graph.
//!
//! Each stream that takes part has a memory of its own in the capture. Blocks are allocated and freed in the order of the recorded
//! work: a block that is dropped in the capture serves the next request of the same stream there. After the capture, the memory
//! serves no request, because each launch uses it. It returns to the pool of the device after the last launch of the dropped graph,
//! once no buffer is in it.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::pool::completion_events::{CompletionEvent, never_recorded};
use crate::pool::device_pool::DevicePool;
use crate::pool::stream_memory::StreamMemory;
use crate::pool::stream_use::{LiveStream, StreamEnd, StreamUse};
use crate::services::Services;
use highwater_hal::{DevicePtr, Error, Result, StreamId};

/// The memory of one stream in a capture. The capture has it, and then the graph; with the last owner, the memory ends.
pub(crate) struct GraphMemory {
    pub(crate) memory: Arc<StreamMemory>,
    /// `Some` until the end.
    life: Option<Arc<GraphLife>>,
    end: Arc<StreamEnd>,
}

/// A capture and then its graph, as the memory sees it: like a stream.
struct GraphLife {
    /// The key of the stream's part in the capture.
    key: u64,
    /// The address of the capture, which may be gone.
    capture: usize,
    stream: Weak<dyn LiveStream>,
    id: StreamId,
    services: Arc<Services>,
    state: Mutex<State>,
}

impl fmt::Debug for GraphLife {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphLife").field("key", &self.key).field("stream", &self.id).finish_non_exhaustive()
    }
}

struct State {
    /// The completion event of the last launch; before the first one, of the work before the capture. `None` if it is unknown
    /// whether the recorded work runs.
    last: Option<Arc<CompletionEvent>>,
    /// Events recorded in the capture, for other streams of it.
    recorded: Vec<Arc<CompletionEvent>>,
}

impl GraphMemory {
    /// Returns the memory of the capture at an address, in the order of a stream that takes part under `key`. Until a launch,
    /// `before` is the last work that uses it.
    pub(crate) fn new(
        pool: &Arc<DevicePool>,
        stream: &Arc<impl LiveStream + 'static>,
        (capture, key): (usize, u64),
        before: &Arc<CompletionEvent>,
    ) -> Self {
        let memory = pool.enlist(key, true);
        let state = State { last: Some(Arc::clone(before)), recorded: Vec::new() };
        let life = Arc::new(GraphLife {
            key,
            capture,
            id: stream.id(),
            stream: Arc::downgrade(stream) as Weak<dyn LiveStream>,
            services: Arc::clone(&pool.services),
            state: Mutex::new(state),
        });
        let end = Arc::<StreamEnd>::default();
        let as_stream = Arc::downgrade(&life) as Weak<dyn LiveStream>;
        memory.belongs_to(StreamUse::new(key, as_stream, Arc::clone(&end)));
        Self { memory, life: Some(life), end }
    }

    /// Notes the end of the last work that uses the memory. `None` if it is unknown.
    pub(super) fn ends_after(&self, last: Option<&Arc<CompletionEvent>>) {
        if let Some(life) = &self.life {
            life.state.lock().last = last.cloned();
        }
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        let Some(life) = self.life.take() else { return };
        if !life.services.generation.is_current() {
            return;
        }
        let State { last, recorded } =
            std::mem::replace(&mut *life.state.lock(), State { last: None, recorded: Vec::new() });
        drop((life, recorded));
        self.end.set(last);
        if self.memory.pool.services.may_release() {
            self.memory.pool.end_stream(&self.memory);
        }
    }
}

impl LiveStream for GraphLife {
    fn id(&self) -> StreamId {
        self.id
    }

    /// Returns the completion event of the last launch.
    fn completion(&self) -> Result<Arc<CompletionEvent>> {
        self.state.lock().last.clone().ok_or_else(never_recorded)
    }

    fn completion_in(&self, capture: usize) -> Result<Option<Arc<CompletionEvent>>> {
        let Some(stream) = self.stream.upgrade().filter(|_| self.capture == capture) else { return Ok(None) };
        let Some(completion) = stream.record_in_capture(self.key)? else { return Ok(None) };
        let completion = Arc::new(completion);
        // An event of a capture must not be recorded again before the capture has ended.
        self.state.lock().recorded.push(Arc::clone(&completion));
        Ok(Some(completion))
    }

    fn is_over(&self) -> bool {
        false
    }

    fn is_idle(&self) -> bool {
        false
    }

    /// Memory of a graph has no pattern.
    unsafe fn fill(&self, _ptr: DevicePtr, _bytes: usize, _value: u8) -> Result<()> {
        Ok(())
    }

    fn keeps_free_memory(&self) -> bool {
        true
    }

    fn count_failed_release(&self, error: &Error) {
        self.services.count_failed_release(error);
    }
}
