//! What the owner of the weights and its workers say to each other.
//!
//! The owner sends one [`Order::Setup`], then batches, then [`Order::Finish`]. The worker says [`Notice::Ready`] when its
//! threads can begin, answers each batch in any order, and after `Finish` gives everything back and sends one
//! [`Notice::Report`]. Instead of any of these it may say [`Notice::Failed`], its last word.

use std::io;
use std::os::unix::net::UnixStream;

use super::frame::{Fields, Message, malformed};
use super::report::Holdings;

/// Both are the same program, so this differs only where one of them is not what it seems.
const VERSION: u64 = 1;

/// When a worker is to kill itself; for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DieAt {
    /// When it has been told to open the weights, and before it does.
    Ticket,
    /// Before it finishes this image, counted from 0 over all passes.
    Image(u64),
}

/// What the owner says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Order {
    Setup {
        /// Name of the backend to open, or path of the plugin.
        backend: String,
        threads: u64,
        die_at: Option<DieAt>,
        /// The ticket of the weights.
        ticket: Vec<u8>,
    },
    Batch {
        number: u64,
        /// Its first image, counted over all passes.
        first_image: u64,
        pixels: Vec<u8>,
    },
    /// There are no more batches.
    Finish,
}

/// What a worker says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Notice {
    Ready,
    Answer { number: u64, digits: Vec<u8> },
    Failed { kind: String, message: String, hint: String },
    Report(WorkerReport),
}

/// What a worker's job came to.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct WorkerReport {
    pub(super) holdings: Holdings,
    /// What its backend counted as alive after everything was given back.
    pub(super) leaks: u64,
    /// Why something was not given back; empty if everything was.
    pub(super) refused: String,
}

const SETUP: u8 = 1;
const BATCH: u8 = 2;
const FINISH: u8 = 3;
const READY: u8 = 4;
const ANSWER: u8 = 5;
const FAILED: u8 = 6;
const REPORT: u8 = 7;

/// `die_at` as one number: the images are far fewer.
const NEVER: u64 = u64::MAX;
const AT_TICKET: u64 = u64::MAX - 1;

impl Order {
    /// Calls `waits` each time the socket's limit for writing, if it has one, has passed.
    pub(super) fn send(&self, socket: &UnixStream, waits: impl FnMut()) -> io::Result<()> {
        let message = match self {
            Self::Setup { backend, threads, die_at, ticket } => {
                let die_at = match *die_at {
                    None => NEVER,
                    Some(DieAt::Ticket) => AT_TICKET,
                    Some(DieAt::Image(image)) => image,
                };
                let message = Message::new(SETUP).number(VERSION).bytes(backend.as_bytes());
                message.number(*threads).number(die_at).bytes(ticket)
            }
            Self::Batch { number, first_image, pixels } => {
                Message::new(BATCH).number(*number).number(*first_image).bytes(pixels)
            }
            Self::Finish => Message::new(FINISH),
        };
        message.send_patiently(socket, waits)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let (kind, mut fields) = Fields::of(message)?;
        let order = match kind {
            SETUP => {
                let version = fields.number()?;
                if version != VERSION {
                    return Err(malformed(&format!("it speaks version {version}, expected {VERSION}")));
                }
                Self::Setup {
                    backend: fields.text()?,
                    threads: fields.number()?,
                    die_at: match fields.number()? {
                        NEVER => None,
                        AT_TICKET => Some(DieAt::Ticket),
                        image => Some(DieAt::Image(image)),
                    },
                    ticket: fields.bytes()?.to_vec(),
                }
            }
            BATCH => Self::Batch {
                number: fields.number()?,
                first_image: fields.number()?,
                pixels: fields.bytes()?.to_vec(),
            },
            FINISH => Self::Finish,
            kind => return Err(malformed(&format!("{kind} is no kind of order"))),
        };
        fields.end()?;
        Ok(order)
    }
}

impl Notice {
    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let message = match self {
            Self::Ready => Message::new(READY),
            Self::Answer { number, digits } => Message::new(ANSWER).number(*number).bytes(digits),
            Self::Failed { kind, message, hint } => {
                Message::new(FAILED).bytes(kind.as_bytes()).bytes(message.as_bytes()).bytes(hint.as_bytes())
            }
            Self::Report(WorkerReport { holdings, leaks, refused }) => {
                let numbers = holdings.to_numbers().into_iter().chain([*leaks]);
                numbers.fold(Message::new(REPORT), Message::number).bytes(refused.as_bytes())
            }
        };
        message.send(socket)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let (kind, mut fields) = Fields::of(message)?;
        let notice = match kind {
            READY => Self::Ready,
            ANSWER => Self::Answer { number: fields.number()?, digits: fields.bytes()?.to_vec() },
            FAILED => Self::Failed { kind: fields.text()?, message: fields.text()?, hint: fields.text()? },
            REPORT => {
                let mut numbers = [0; Holdings::NUMBERS];
                for number in &mut numbers {
                    *number = fields.number()?;
                }
                Self::Report(WorkerReport {
                    holdings: Holdings::from_numbers(numbers),
                    leaks: fields.number()?,
                    refused: fields.text()?,
                })
            }
            kind => return Err(malformed(&format!("{kind} is no kind of notice"))),
        };
        fields.end()?;
        Ok(notice)
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Inbox;
    use super::*;

    fn sent(send: impl FnOnce(&UnixStream) -> io::Result<()>) -> Vec<u8> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours).unwrap();
        Inbox::default().wait(&theirs).unwrap().unwrap()
    }

    #[test]
    fn orders_and_notices_are_read_as_they_were_sent() {
        for die_at in [None, Some(DieAt::Ticket), Some(DieAt::Image(0)), Some(DieAt::Image(539))] {
            let setup = Order::Setup { backend: "mock".into(), threads: 2, die_at, ticket: vec![1, 2, 3] };
            assert_eq!(Order::read(&sent(|socket| setup.send(socket, || ()))).unwrap(), setup);
        }
        for order in [Order::Batch { number: 7, first_image: 224, pixels: vec![9; 2048] }, Order::Finish] {
            assert_eq!(Order::read(&sent(|socket| order.send(socket, || ()))).unwrap(), order);
        }
        let numbers = std::array::from_fn(|index| index as u64 + 1);
        let report =
            WorkerReport { holdings: Holdings::from_numbers(numbers), leaks: 3, refused: "free: refused".into() };
        let failed = Notice::Failed { kind: "expired".into(), message: "gone".into(), hint: String::new() };
        let answer = Notice::Answer { number: u64::MAX, digits: vec![1, 2] };
        for notice in [Notice::Ready, answer, failed, Notice::Report(report)] {
            assert_eq!(Notice::read(&sent(|socket| notice.send(socket))).unwrap(), notice);
        }
    }

    #[test]
    fn every_truncation_of_a_message_is_refused() {
        let order = Order::Setup { backend: "mock".into(), threads: 2, die_at: None, ticket: vec![1, 2, 3] };
        let notice = Notice::Report(WorkerReport { refused: "x".into(), ..WorkerReport::default() });
        let (order, notice) = (sent(|socket| order.send(socket, || ())), sent(|socket| notice.send(socket)));
        for length in 0..order.len() {
            assert!(Order::read(&order[..length]).is_err(), "{length}");
        }
        for length in 0..notice.len() {
            assert!(Notice::read(&notice[..length]).is_err(), "{length}");
        }
        assert!(Order::read(&notice).is_err() && Notice::read(&order).is_err());
    }

    #[test]
    fn another_version_is_refused_with_both() {
        let message = Message::new(SETUP).number(VERSION + 1);
        let error = Order::read(&sent(|socket| message.send(socket))).unwrap_err().to_string();
        assert!(error.contains("version 2, expected 1"), "{error}");
    }
}
