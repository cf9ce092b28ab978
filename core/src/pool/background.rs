//! The thread that releases idle page-locked memory. It exists only if the program asks for it.
//!
//! Without it, a program that makes no more calls keeps its idle memory. The thread wakes twice in each idle time. It refers to
//! the pool weakly, so it keeps no runtime alive. The last user of the runtime ends it, and waits for the piece that it is
//! releasing. A forked child has no such thread. Once the process exits, the thread makes no call.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::pinned::PinnedPool;
use crate::own_thread::OwnThread;
use highwater_hal::{Result, fork::Generation};

/// The shortest pause, for short idle times.
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);

/// The thread of one pool.
#[derive(Debug)]
pub(crate) struct Background {
    signal: Arc<Signal>,
    thread: OwnThread,
}

#[derive(Debug, Default)]
struct Signal {
    is_stopping: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    fn is_stopping(&self) -> bool {
        *self.is_stopping.lock()
    }

    /// Waits. Returns whether the thread must end.
    fn pause(&self, pause: Duration) -> bool {
        let mut is_stopping = self.is_stopping.lock();
        if !*is_stopping {
            self.changed.wait_for(&mut is_stopping, pause);
        }
        *is_stopping
    }
}

impl Background {
    /// Starts the thread of a pool that releases memory after `idle_time`.
    pub(crate) fn start(pool: Weak<PinnedPool>, idle_time: Duration, generation: Generation) -> Result<Self> {
        let signal = Arc::<Signal>::default();
        let own = Arc::clone(&signal);
        let pause = (idle_time / 2).max(SHORTEST_PAUSE);
        let work = move || {
            while !own.pause(pause)
                && let Some(pool) = pool.upgrade()
                && pool.release_idle(|| own.is_stopping())
            {}
        };
        let names = ("highwater-idle", "host memory options", ", or leave `background` off");
        Ok(Self { thread: OwnThread::start(names, generation, work)?, signal })
    }

    /// Ends the thread. Waits for its end if `waits`.
    pub(crate) fn stop(&self, waits: bool) {
        *self.signal.is_stopping.lock() = true;
        self.signal.changed.notify_all();
        self.thread.end(waits);
    }
}
