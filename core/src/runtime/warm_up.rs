//! The thread that makes handles before the first request, which a program gets only on request.
//!
//! It refers to the runtime weakly between two handles. The last user of the runtime cancels it, and waits for the handle under
//! way. A forked child has no such thread. Once the process exits, the thread makes no call, and no thread waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::inner::RuntimeInner;
use crate::own_thread::OwnThread;
use highwater_hal::{BlasKind, ErrorKind, Result};

/// The thread of one runtime.
#[derive(Debug)]
pub(super) struct WarmUp {
    is_stopping: Arc<AtomicBool>,
    thread: OwnThread,
}

impl WarmUp {
    /// Starts the thread, which makes `handles` BLAS handles of device 0 with their workspaces.
    pub(super) fn start(runtime: &Arc<RuntimeInner>, handles: usize) -> Result<Self> {
        let is_stopping = Arc::<AtomicBool>::default();
        let (own, weak) = (Arc::clone(&is_stopping), Arc::downgrade(runtime));
        let work = move || {
            for _ in 0..handles {
                // Relaxed: the flag orders nothing; the join does.
                if own.load(Ordering::Relaxed) || !Self::add_one(&weak) {
                    return;
                }
            }
        };
        let names = ("highwater-warm", "warm handles", ", or request no warm handles");
        Ok(Self { thread: OwnThread::start(names, runtime.services.generation, work)?, is_stopping })
    }

    /// Makes one handle and one workspace. Returns whether to go on.
    fn add_one(runtime: &Weak<RuntimeInner>) -> bool {
        let Some(runtime) = runtime.upgrade() else { return false };
        let bytes = runtime.services.device(0).workspace_bytes(BlasKind::Blas);
        let added = runtime.handles.add_idle(0, BlasKind::Blas).and_then(|()| runtime.workspaces.add_idle(0, bytes));
        match added {
            Ok(()) => true,
            Err(error) => {
                if error.kind() != ErrorKind::ShuttingDown {
                    crate::warnings::warning!("the warm handles could not be made: {error}");
                    runtime.handles.keep_warm_error(error);
                }
                false
            }
        }
    }

    /// Cancels the thread. Waits for its end if `waits`.
    pub(super) fn stop(&self, waits: bool) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.thread.end(waits);
    }
}
