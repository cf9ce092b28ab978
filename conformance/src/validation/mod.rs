//! The validation layer: a layer between a case and the backend under test that records objects and judges answers.
//!
//! Every call of a case passes the layer unchanged, bad ids and bad pointers included: cases pass them on purpose, and the
//! backend must refuse them. The layer judges the *answers*. It finds an id that is accepted after its end, a block that is
//! freed twice, a copy to freed memory, or an object of another device. At the end of the case it names the objects that are
//! left, with the line that made them, and compares `live_objects()` with its ledger. A finding fails the case.
//!
//! - `ledger`: the living objects and the findings; `ranges`: memory by address; `origin`: the line of a case that made an
//!   object
//!
//! - `backend`, `blas`, `host`, `sharing`: the layers over the four traits
//!
//! - `refused_releases`: repeats the releases that a fault refused
//!
//! The layer makes no call of its own (apart from `refused_releases`, at the end of a case), and holds no lock during a call
//! of the backend. It judges an answer by the ledger *before* the call began. Two threads that use and destroy one object at
//! the same time therefore cause no false finding.
//!
//! The fault sweep sits here too: every fallible call first passes the [`Gate`], if any.
//!
//! Below a mutant, the layer also refuses ranges that leave their memory, because callers must not pass such ranges to a backend.

mod backend;
mod blas;
mod host;
mod ledger;
mod origin;
mod ranges;
mod refused_releases;
mod sharing;
#[cfg(test)]
mod tests;

use std::ops::Deref;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use highwater_hal::{
    Answer, AnyId, Backend, Call, Error, ErrorKind, HostAllocator, IpcSharing, LiveObjects, Result, StreamId,
};

pub(crate) use self::origin::made_here;

use self::ledger::{Ledger, Unsound};
use self::ranges::{Holding, Range, Space};
use crate::sweep::Gate;

/// The backend below the layer.
#[derive(Debug)]
enum Below<'b> {
    /// For one case.
    Borrowed(&'b dyn Backend),
    /// For all cases of a mutant.
    Shared(Arc<dyn Backend>),
}

impl<'b> Deref for Below<'b> {
    type Target = dyn Backend + 'b;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Borrowed(backend) => *backend,
            Self::Shared(backend) => &**backend,
        }
    }
}

/// A backend under validation, for one case.
#[derive(Debug)]
pub(crate) struct Validated<'b> {
    inner: Below<'b>,
    books: Arc<Books>,
    before: LiveObjects,
    /// The first allocator and the first sharing that the backend returned, each with the layer over it.
    allocator: OnceLock<(Arc<dyn HostAllocator>, Arc<dyn HostAllocator>)>,
    sharing: OnceLock<(Arc<dyn IpcSharing>, Arc<dyn IpcSharing>)>,
}

impl<'b> Validated<'b> {
    /// Begins the validation of one case.
    pub(crate) fn new(inner: &'b dyn Backend, gate: Option<Gate>) -> Self {
        Self::over(Below::Borrowed(inner), gate, false)
    }

    fn over(inner: Below<'b>, gate: Option<Gate>, refuses: bool) -> Self {
        let ledger = Ledger::new(inner.identity().tag, inner.device_count());
        let before = inner.live_objects();
        let books = Arc::new(Books { ledger: Mutex::new(ledger), gate, refuses, process: std::process::id() });
        Self { inner, books, before, allocator: OnceLock::new(), sharing: OnceLock::new() }
    }

    /// Returns the findings at the end of the case.
    pub(crate) fn findings(&self) -> Vec<String> {
        let after = self.inner.live_objects();
        self.books.ledger().close(&self.before, &after)
    }

    /// Returns the number of releases that a fault refused and that were repeated.
    pub(crate) fn retried(&self) -> u64 {
        self.books.ledger().retried
    }

    /// Returns the gate that every fallible call passes.
    pub(crate) fn gate(&self) -> Option<&Gate> {
        self.books.gate.as_ref()
    }
}

impl Validated<'static> {
    /// Creates a layer that refuses ranges that leave their memory, because the backend need not check them.
    pub(crate) fn refusing(inner: Arc<dyn Backend>) -> Self {
        Self::over(Below::Shared(inner), None, true)
    }
}

/// The state that the layers of one case share.
#[derive(Debug)]
struct Books {
    ledger: Mutex<Ledger>,
    gate: Option<Gate>,
    /// Whether the layer refuses what the caller must not pass.
    refuses: bool,
    /// The process of the case.
    process: u32,
}

impl Books {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // A thread that panics leaves no change of the ledger half made.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a fallible call.
    fn enter(&self, operation: &'static str) -> Result<()> {
        self.gate.as_ref().map_or(Ok(()), |gate| gate.enter(operation))
    }

    /// Forwards a call, and judges its answer by the device and the ids that it names.
    fn call<T: Answer>(&self, call: &Call, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let (operation, ids) = (call.operation, call.ids().collect::<Vec<_>>());
        if let (true, [id]) = (operation.starts_with("destroy_"), &*ids) {
            return self.destroying(operation, *id, forward);
        }
        let at = if T::ISSUES { origin::take() } else { None };
        let answer = self.with_ids(operation, &ids, forward)?;
        let device = call.device.or_else(|| ids.first().map(|id| id.parts().device));
        match (answer.issued(), device) {
            (Some(id), Some(device)) => self.issued(operation, id, device, at),
            (None, Some(device)) if ids.is_empty() => self.ledger().check_device(operation, device),
            _ => {}
        }
        Ok(answer)
    }

    fn found(&self, text: String) {
        self.ledger().found(text);
    }

    /// Makes a call, and judges its error, if any.
    fn calling<T>(&self, operation: &'static str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        call().inspect_err(|error| self.judge_error(operation, error))
    }

    /// Judges the form of an error. `copy_2d` may be a copy for each row, whose error is that of `copy`.
    fn judge_error(&self, operation: &'static str, error: &Error) {
        let named = error.operation();
        if named != operation && (operation, named) != ("copy_2d", "copy") {
            self.found(format!("`{operation}` returned an error of `{named}`: {error}"));
        }
        if error.message().trim().is_empty() {
            self.found(format!("`{operation}` returned an error without a message: {error}"));
        }
    }

    /// Makes a call that receives these ids, and judges the answer.
    fn with_ids<T>(&self, operation: &'static str, ids: &[AnyId], call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.enter(operation)?;
        let unsound = self.unsound(ids);
        let answer = self.calling(operation, call);
        self.judge(operation, ids, unsound, &answer);
        answer
    }

    /// Returns the first of the ids that the backend must refuse.
    fn unsound(&self, ids: &[AnyId]) -> Option<Unsound> {
        let ledger = self.ledger();
        ids.iter().find_map(|&id| ledger.unsound(id))
    }

    /// Returns whether the backend must accept all of the ids.
    fn are_sound(&self, ids: &[AnyId]) -> bool {
        let ledger = self.ledger();
        ids.iter().all(|&id| ledger.is_sound(id))
    }

    fn judge<T>(&self, operation: &'static str, ids: &[AnyId], unsound: Option<Unsound>, answer: &Result<T>) {
        match (unsound, answer) {
            (Some(id), Ok(_)) => self.found(format!("use after destroy: `{operation}` accepted {id}")),
            // Another thread may have destroyed an object meanwhile, or may be about to.
            (None, Err(error))
                if error.kind() == ErrorKind::InvalidHandle && !ids.is_empty() && self.are_sound(ids) =>
            {
                self.found(format!("`{operation}` refused ids that are alive: {error}"));
            }
            _ => {}
        }
    }

    /// Makes a call that destroys the object of an id.
    fn destroying<T>(&self, operation: &'static str, id: AnyId, call: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Err(fault) = self.enter(operation) {
            if let Some(entry) = self.ledger().entry_mut(id) {
                entry.refused = true;
            }
            return Err(fault);
        }
        let unsound = self.unsound(&[id]);
        // Whether another thread destroys the object at the same time. One of the two is refused.
        let is_contended = self.ledger().begins_to_destroy(id, true);
        let answer = self.calling(operation, call);
        if answer.is_ok() {
            let mut ledger = self.ledger();
            if !ledger.remove(id) {
                let what = unsound.map_or_else(|| format!("{id:?}"), |id| id.to_string());
                ledger.found(format!("double free: `{operation}` accepted {what}"));
            }
        } else if !is_contended {
            self.ledger().begins_to_destroy(id, false);
            self.judge(operation, &[id], unsound, &answer);
        }
        answer
    }

    /// Enters an id that a call issued.
    fn issued(&self, operation: &'static str, id: AnyId, device: u32, at: Option<&'static Location<'static>>) {
        let mut ledger = self.ledger();
        let made = ledger.made(operation, at);
        ledger.issued(id, device, made, operation.ends_with("_from_raw"));
    }

    /// Enters memory that a call returned.
    fn given(
        &self,
        operation: &'static str,
        (space, start): (Space, u64),
        bytes: u64,
        holding: Holding,
        at: Option<&'static Location<'static>>,
    ) {
        let mut ledger = self.ledger();
        if let Space::Device(device) = space {
            ledger.check_device(operation, device);
        }
        if let (Holding::Mapped { .. }, Some(range)) = (holding, ledger.ranges.get_mut(space, start))
            && let Holding::Mapped { opens } = &mut range.holding
        {
            *opens += 1;
            return;
        }
        let made = ledger.made(operation, at);
        let range = Range { made, bytes, holding, releasing: false, refused: false };
        if let Some(text) = ledger.ranges.insert(space, start, range) {
            ledger.found(text);
        }
    }

    /// Makes a call that gives memory back. `misuse` says why this call must not give back such memory.
    fn releasing(
        &self,
        operation: &'static str,
        (space, start): (Space, u64),
        misuse: impl FnOnce(Holding) -> Option<String>,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (number, complaint) = self.begin_release(operation, space, start, misuse);
        let entered = self.enter(operation);
        let refused = entered.is_err();
        // The backend checks the other calls itself.
        let is_promised = matches!(operation, "free" | "host_free") && self.ledger().has(space);
        let unknown = (is_promised && number.is_none()).then(|| format!("nothing that is alive begins at {start:#x}"));
        let answer = entered
            .and_then(|()| self.refuse(operation, unknown.as_ref()))
            .and_then(|()| self.calling(operation, call));
        let mut ledger = self.ledger();
        if answer.is_ok()
            && let Some(text) = complaint
        {
            ledger.found(text);
        }
        // If the range is another one, the backend has issued the address again before this call returned.
        let range = ledger.ranges.get_mut(space, start);
        let Some(range) = range.filter(|range| Some(range.made.number) == number) else { return answer };
        range.releasing = false;
        let retried = range.refused && answer.is_ok();
        range.refused = refused;
        if answer.is_ok() {
            match &mut range.holding {
                Holding::Mapped { opens } if *opens > 1 => *opens -= 1,
                _ => ledger.ranges.remove(space, start),
            }
        }
        ledger.retried += u64::from(retried);
        answer
    }

    /// Marks memory as being given back. Returns its number, and the finding if the backend accepts the call.
    fn begin_release(
        &self,
        operation: &'static str,
        space: Space,
        start: u64,
        misuse: impl FnOnce(Holding) -> Option<String>,
    ) -> (Option<u64>, Option<String>) {
        let mut ledger = self.ledger();
        let ranges = &mut ledger.ranges;
        if let Some(range) = ranges.get_mut(space, start).filter(|range| !range.releasing) {
            range.releasing = true;
            let name = range.holding.name();
            let made = range.made;
            let complaint = misuse(range.holding);
            let text = complaint.map(|what| format!("{what}: `{operation}` accepted a {}", made.of(name)));
            return (Some(made.number), text);
        }
        let text = match (ranges.gone(space, start), ranges.elsewhere(space, start)) {
            (_, Some(range)) => {
                format!("wrong device: `{operation}` accepted a {}", range.made.of(range.holding.name()))
            }
            (Some(range), None) => {
                let name = range.holding.name();
                format!("double free: `{operation}` accepted a {name} that is gone: {}", range.made.of(name))
            }
            (None, None) => {
                format!("`{operation}` accepted the address {start:#x}, where nothing begins that is alive")
            }
        };
        (None, Some(text))
    }

    /// Returns what is wrong with the use of these ranges, if anything. Each has a name for the finding.
    fn misuse(&self, ranges: &[(&str, (Space, u64), u64)]) -> Option<String> {
        let ledger = self.ledger();
        ranges.iter().find_map(|&(what, (space, start), bytes)| ledger.ranges.misuse(what, space, start, bytes))
    }

    /// Refuses a misuse of memory, if the layer does so.
    fn refuse(&self, operation: &'static str, misuse: Option<&String>) -> Result<()> {
        // In a forked child, the backend answers first.
        match misuse.filter(|_| self.refuses && std::process::id() == self.process) {
            Some(text) => Err(Error::new(ErrorKind::InvalidPointer, operation, text.as_str())),
            None => Ok(()),
        }
    }

    /// Makes a call on a stream that uses these ranges, and judges the answer.
    fn using(
        &self,
        operation: &'static str,
        stream: StreamId,
        ranges: &[(&str, (Space, u64), u64)],
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (misuse, ids) = (self.misuse(ranges), [AnyId::Stream(stream)]);
        // The backend refuses bad ids and bad ordinals.
        let is_sound =
            self.unsound(&ids).is_none() && ranges.iter().all(|(_, (space, _), _)| self.ledger().has(*space));
        let answer = self.with_ids(operation, &ids, || {
            self.refuse(operation, misuse.as_ref().filter(|_| is_sound))?;
            call()
        });
        self.judge_use(operation, misuse, &answer);
        answer
    }

    /// Records a misuse that the backend accepted.
    fn judge_use<T>(&self, operation: &'static str, misuse: Option<String>, answer: &Result<T>) {
        if let (Some(text), Ok(_)) = (misuse, answer) {
            self.found(format!("`{operation}` was accepted: {text}"));
        }
    }
}
