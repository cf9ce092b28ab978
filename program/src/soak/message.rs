//! The messages between `highwater soak ipc` and its workers.

use std::io;

use super::super::frame::{Field, Frame, Payload, fields, malformed, messages};
use super::operation::Operation;
use super::pattern::Pattern;

/// The form of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// A ticket of device memory.
    Ticket,
    /// A batch, with one slice for each pattern.
    Batch,
    /// A ticket of page-locked memory.
    Pinned,
}

/// Shared memory that others may open, until its owner drops it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Offer {
    /// The process id of the owner, and the number of the memory in it.
    pub(super) owner: u32,
    pub(super) number: u64,
    pub(super) form: Form,
    pub(super) bytes: Vec<u8>,
    pub(super) patterns: Vec<Pattern>,
}

/// The time of a call, in nanoseconds of the monotonic clock, which all processes have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// A call that took long.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Slow {
    pub(super) operation: Operation,
    /// The process that the call may wait for.
    pub(super) peer: Option<u32>,
    pub(super) span: Span,
}

/// An open that was refused.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Refusal {
    pub(super) owner: u32,
    pub(super) number: u64,
    pub(super) span: Span,
    /// The name of the kind of the error.
    pub(super) kind: String,
    pub(super) message: String,
}

/// A process that has appeared in the list of a worker's runtime, or that is gone from it, and the time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Trace {
    pub(super) pid: u32,
    pub(super) is_there: bool,
    pub(super) at: u64,
}

/// The state of a worker that has released everything and closed its runtime.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Remains {
    /// Bytes that it still shared, or had mapped, or that its device still counts as used.
    pub(super) bytes: u64,
    pub(super) objects: u64,
    pub(super) descriptors: u64,
    /// Importers and exporters whose death it has seen.
    pub(super) deaths: u64,
}

fields!(Offer { owner, number, form, bytes, patterns });
fields!(Span { start, end });
fields!(Slow { operation, peer, span });
fields!(Refusal { owner, number, span, kind, message });
fields!(Trace { pid, is_there, at });
fields!(Remains { bytes, objects, descriptors, deaths });

messages! {
    /// A message to a worker.
    enum Order {
        /// The backend's address, the seed, and the directory of the rendezvous; no directory stands for abstract names. A worker
        /// that is spared is never killed, and must not cut its sockets.
        1 Begin { backend: String, seed: u64, directory: Option<String>, is_spared: bool },
        /// The answer to `Want`: offers of other workers.
        2 Take { offers: Vec<Offer> },
        /// Release everything, and end.
        3 End,
    }
}

messages! {
    /// A message of a worker.
    enum Notice {
        4 Ready,
        5 Shared(offer: Offer),
        /// The owner is about to drop its memory with this number.
        6 Dropping(number: u64),
        /// The worker has few offers left.
        7 Want,
        8 Refused(refusal: Refusal),
        9 Took(slow: Slow),
        /// Numbers of successful operations since the last such message, in the order of `Operation::ALL`.
        10 Did(counts: Vec<u64>),
        /// Words that other processes changed, and buffers that were revoked because their owner died.
        11 Found { changed: u64, revoked: u64 },
        /// Contents that are not the memory's own.
        12 Early(what: String),
        /// A call that must not fail has failed.
        13 Failed(what: String),
        /// A child process was started, which holds this many descriptors of the worker.
        14 Bequeathed(descriptors: u64),
        /// The worker is about to cut its sockets, and will continue to use the memory that it has.
        15 Cutting,
        16 Saw(traces: Vec<Trace>),
        17 Ended(remains: Remains),
    }
}

impl Field for Form {
    fn put(&self, frame: &mut Frame) {
        (*self as u64).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        match u64::take(payload)? {
            0 => Ok(Self::Ticket),
            1 => Ok(Self::Batch),
            2 => Ok(Self::Pinned),
            other => Err(malformed(format!("{other} is no form of an offer"))),
        }
    }
}

impl Field for Pattern {
    fn put(&self, frame: &mut Frame) {
        (self.tag(), self.side() as u64).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        let (tag, side): (u64, u64) = Field::take(payload)?;
        let side = side as usize;
        if Self::SIDES.contains(&side) {
            Ok(Self::new(tag, side))
        } else {
            Err(malformed(format!("{side} is no side")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::decode;
    use super::super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn orders_and_notices_arrive_as_they_were_sent() {
        let patterns = vec![Pattern::new(77, 32), Pattern::new(78, 8)];
        let offer = Offer { owner: 12, number: 3, form: Form::Batch, bytes: vec![1, 2, 3], patterns };
        let span = Span { start: 5, end: 9 };
        check_round_trip(&Order::Begin {
            backend: "mock".into(),
            seed: 7,
            directory: Some("/run".into()),
            is_spared: true,
        });
        check_round_trip(&Order::Take { offers: vec![offer.clone(), Offer { form: Form::Pinned, ..offer.clone() }] });
        check_round_trip(&Order::End);
        let refusal = Refusal { owner: 12, number: 3, span, kind: "Expired".into(), message: "gone".into() };
        let notices = [
            Notice::Ready,
            Notice::Shared(offer),
            Notice::Dropping(3),
            Notice::Want,
            Notice::Refused(refusal),
            Notice::Took(Slow { operation: Operation::Open, peer: Some(12), span }),
            Notice::Did(vec![1; 10]),
            Notice::Found { changed: 1, revoked: 2 },
            Notice::Saw(vec![Trace { pid: 12, is_there: true, at: 7 }]),
            Notice::Early("word 7".into()),
            Notice::Failed("open".into()),
            Notice::Bequeathed(9),
            Notice::Cutting,
            Notice::Ended(Remains { bytes: 1, objects: 2, descriptors: 3, deaths: 4 }),
        ];
        notices.iter().for_each(check_round_trip);
        let no_side = [&[0; 8][..], &77_u64.to_le_bytes(), &33_u64.to_le_bytes()].concat();
        let offer = [&[5][..], &[0; 24], &[0; 8], &1_u64.to_le_bytes(), &no_side[8..]].concat();
        assert_eq!(decode::<Notice>(&offer).unwrap_err().to_string(), "33 is no side");
        assert!(decode::<Notice>(&[1]).is_err() && decode::<Order>(&[4]).is_err());
    }
}
