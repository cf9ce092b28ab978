//! The messages between the owner of the weights and its workers.
//!
//! The owner sends one [`Order::Setup`], then batches, then [`Order::Finish`]. The worker sends [`Notice::Ready`] when its
//! threads can begin, and answers the batches in any order. After `Finish` it frees everything and sends one
//! [`Notice::Report`]. [`Notice::Failed`] may take the place of any of these, and is its last message.

use super::failure::Explanation;
use super::frame::{Field, Frame, Payload, fields, messages};
use super::report::Holdings;

/// The moment at which a worker kills itself; for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DieAt {
    /// Before it opens the weights.
    Ticket,
    /// Before it finishes this image, counted from 0 over all passes.
    Image(u64),
}

impl Field for DieAt {
    fn put(&self, frame: &mut Frame) {
        let image = match *self {
            Self::Ticket => None,
            Self::Image(image) => Some(image),
        };
        image.put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> std::io::Result<Self> {
        let image: Option<u64> = Field::take(payload)?;
        Ok(image.map_or(Self::Ticket, Self::Image))
    }
}

messages! {
    /// A message of the owner.
    enum Order {
        1 Setup {
            /// Name of the backend to open, or path of the plugin.
            backend: String,
            threads: u64,
            die_at: Option<DieAt>,
            /// The ticket of the weights.
            ticket: Vec<u8>,
        },
        2 Batch {
            number: u64,
            /// Its first image, counted over all passes.
            first_image: u64,
            pixels: Vec<u8>,
        },
        /// No more batches follow.
        3 Finish,
    }
}

messages! {
    /// A message of a worker.
    enum Notice {
        4 Ready,
        5 Answer { number: u64, digits: Vec<u8> },
        6 Failed(why: Explanation),
        7 Report(report: WorkerReport),
    }
}

/// The result of a worker.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct WorkerReport {
    pub(super) holdings: Holdings,
    /// The objects that its backend counts as alive after everything was freed.
    pub(super) leaks: u64,
    /// The error of a release that failed; empty if none did.
    pub(super) refused: String,
}

fields!(WorkerReport { holdings, leaks, refused });

#[cfg(test)]
mod tests {
    use super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn orders_and_notices_arrive_as_they_were_sent_and_no_truncation_is_read() {
        for die_at in [None, Some(DieAt::Ticket), Some(DieAt::Image(0)), Some(DieAt::Image(539))] {
            check_round_trip(&Order::Setup { backend: "mock".into(), threads: 2, die_at, ticket: vec![1, 2, 3] });
        }
        check_round_trip(&Order::Batch { number: 7, first_image: 224, pixels: vec![9; 2048] });
        check_round_trip(&Order::Finish);
        let holdings =
            Holdings { handles_created: 1, threads_served: 2, workspaces: 3, mapped_bytes: 7, ..Holdings::default() };
        let failed = Explanation { kind: Some("expired".into()), message: "gone".into(), hint: String::new() };
        let answer = Notice::Answer { number: u64::MAX, digits: vec![1, 2] };
        let report = Notice::Report(WorkerReport { holdings, leaks: 3, refused: "free: refused".into() });
        for notice in [Notice::Ready, answer, Notice::Failed(failed), report] {
            check_round_trip(&notice);
        }
    }

    #[test]
    fn the_messages_of_one_side_are_not_those_of_the_other() {
        for kind in 0..=8 {
            let is_order = super::super::frame::decode::<Order>(&[kind]).is_ok();
            assert_eq!(is_order, kind == 3, "{kind}");
            assert_eq!(super::super::frame::decode::<Notice>(&[kind]).is_ok(), kind == 4, "{kind}");
        }
    }
}
