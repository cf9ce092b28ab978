//! The validation layer: a backend between a case and the backend under test that keeps books.
//!
//! Everything that a case does goes through it to the backend as it is, bad ids and bad pointers included: cases pass them on
//! purpose, and the backend has to refuse them. What the layer judges is the *answers*: an id that was destroyed and is
//! accepted, a block that is freed twice, a copy to memory that is gone, an object of another device than was asked for.
//! When the case has ended it names what is left over, with the place where it was made, and holds `live_objects()` against
//! its own books. A finding fails the case.
//!
//! - `ledger`: what is alive and what was found; `book`: memory by address; `origin`: where a case made an object
//! - `backend`, `blas`, `host`, `sharing`: the four traits, handed through
//! - `refused_releases`: repeats the releases that a fault refused
//!
//! The layer makes no call of its own (apart from `refused_releases`, when a case has ended), and holds no lock while the backend is
//! called. An answer is judged by what was known *before* the call began, so that two threads that use and destroy one
//! object at the same time are not misjudged.
//!
//! It is also where the fault sweep sits: every fallible call passes the [`Gate`] first, if there is one.

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

use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use highwater_hal::{Answer, AnyId, Backend, Call, ErrorKind, LiveObjects, Result};

pub(crate) use self::origin::made_here;

use self::ledger::{Ledger, Unsound};
use self::ranges::{Holding, Range, Space};
use crate::sweep::Gate;

/// A backend as one case sees it.
#[derive(Debug)]
pub(crate) struct Validated<'b> {
    inner: &'b dyn Backend,
    books: Arc<Books>,
    before: LiveObjects,
}

impl<'b> Validated<'b> {
    /// Begins to books, for one case.
    pub(crate) fn new(inner: &'b dyn Backend, gate: Option<Gate>) -> Self {
        let ledger = Ledger::new(inner.identity().tag, inner.device_count());
        let books = Arc::new(Books { ledger: Mutex::new(ledger), gate });
        Self { inner, books, before: inner.live_objects() }
    }

    /// What was wrong, when the case has ended.
    pub(crate) fn findings(&self) -> Vec<String> {
        let after = self.inner.live_objects();
        self.books.ledger().close(&self.before, &after)
    }

    /// Releases that a fault refused and that were made again.
    pub(crate) fn retried(&self) -> u64 {
        self.books.ledger().retried
    }

    /// The gate that every fallible call passes.
    pub(crate) fn gate(&self) -> Option<&Gate> {
        self.books.gate.as_ref()
    }
}

/// What the four traits of one case share.
#[derive(Debug)]
struct Books {
    ledger: Mutex<Ledger>,
    gate: Option<Gate>,
}

impl Books {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Each change is whole at any point where a thread can panic.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The beginning of every fallible call.
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

    /// Makes a call that takes these ids, and judges the answer.
    fn with_ids<T>(&self, operation: &'static str, ids: &[AnyId], call: impl FnOnce() -> Result<T>) -> Result<T> {
        self.enter(operation)?;
        let unsound = self.unsound(ids);
        let answer = call();
        self.judge(operation, ids, unsound, &answer);
        answer
    }

    /// The first of the ids that should be refused.
    fn unsound(&self, ids: &[AnyId]) -> Option<Unsound> {
        let ledger = self.ledger();
        ids.iter().find_map(|&id| ledger.unsound(id))
    }

    fn judge<T>(&self, operation: &'static str, ids: &[AnyId], unsound: Option<Unsound>, answer: &Result<T>) {
        match (unsound, answer) {
            (Some(id), Ok(_)) => self.found(format!("use after destroy: `{operation}` accepted {id}")),
            // Another thread may have destroyed one meanwhile.
            (None, Err(error))
                if error.kind() == ErrorKind::InvalidHandle && !ids.is_empty() && self.unsound(ids).is_none() =>
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
        let answer = call();
        if answer.is_ok() {
            let mut ledger = self.ledger();
            if !ledger.remove(id) {
                let what = unsound.map_or_else(|| format!("{id:?}"), |id| id.to_string());
                ledger.found(format!("double free: `{operation}` accepted {what}"));
            }
        } else {
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

    /// Takes in memory that a call gave.
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

    /// Makes a call that gives memory back. `misuse` says what is wrong with giving back such memory by this call.
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
        let answer = entered.and_then(|()| call());
        let mut ledger = self.ledger();
        if answer.is_ok()
            && let Some(text) = complaint
        {
            ledger.found(text);
        }
        // Where it is another range by now, the address was given out again before this call returned.
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

    /// Notes that memory is being given back: its number, and what is wrong if the backend accepts it.
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

    /// What is wrong with the use of these ranges, if so; each is named in words.
    fn misuse(&self, ranges: &[(&str, (Space, u64), u64)]) -> Option<String> {
        let ledger = self.ledger();
        ranges.iter().find_map(|&(what, (space, start), bytes)| ledger.ranges.misuse(what, space, start, bytes))
    }

    /// Notes what was wrong with a call, where the backend accepted it.
    fn judge_use<T>(&self, operation: &'static str, misuse: Option<String>, answer: &Result<T>) {
        if let (Some(text), Ok(_)) = (misuse, answer) {
            self.found(format!("`{operation}` was accepted: {text}"));
        }
    }
}
