//! What the runner and its worker say to each other: one JSON text in each frame.
//!
//! The worker says [`Notice::Ready`] or [`Notice::Failed`] when it has opened the backend, or not. Then it answers each
//! order with one notice, and ends when the socket is closed.

use std::io;
use std::os::unix::net::UnixStream;

use highwater_conformance::{Calls, Case, Fault, Faulted, Points, Status, cases};
use serde_json::{Value, json};

use super::super::frame::{Fields, Message, malformed};

/// The only kind of frame.
const TEXT: u8 = 1;

/// The longest text of a failure that travels; what is cut off says more of the same.
const LONGEST_TEXT: usize = 64 << 10;

/// What the runner asks for.
#[derive(Debug, Clone)]
pub(super) enum Order {
    Run(&'static Case),
    Points(&'static Case),
    Fault(&'static Case, Fault),
}

/// Who the backend under test is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct About {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) real_device: bool,
    /// Of the backend and of each library, as `(what, version)`.
    pub(super) versions: Vec<(String, String)>,
    /// As `doctor` prints them.
    pub(super) devices: Value,
}

/// What the worker answers.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Notice {
    Ready(About),
    Failed { kind: String, message: String, hint: String },
    Ended(Status),
    Points(Points),
    Faulted(Faulted),
}

fn send(value: &Value, socket: &UnixStream) -> io::Result<()> {
    Message::new(TEXT).bytes(value.to_string().as_bytes()).send(socket)
}

fn read(message: &[u8]) -> io::Result<Value> {
    let (TEXT, mut fields) = Fields::of(message)? else { return Err(malformed("its kind is unknown")) };
    let value = serde_json::from_slice(fields.bytes()?).map_err(|_| malformed("it is no JSON"))?;
    fields.end()?;
    Ok(value)
}

fn text(value: &Value, key: &str) -> io::Result<String> {
    value[key].as_str().map(str::to_owned).ok_or_else(|| malformed(&format!("it has no text `{key}`")))
}

fn number(value: &Value, key: &str) -> io::Result<u64> {
    value[key].as_u64().ok_or_else(|| malformed(&format!("it has no number `{key}`")))
}

fn small(value: &Value, key: &str) -> io::Result<u32> {
    u32::try_from(number(value, key)?).map_err(|_| malformed(&format!("its number `{key}` is too large")))
}

fn list<'v>(value: &'v Value, key: &str) -> io::Result<&'v Vec<Value>> {
    value[key].as_array().ok_or_else(|| malformed(&format!("it has no list `{key}`")))
}

/// No longer than what fits a message.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(LONGEST_TEXT)]
}

impl Order {
    pub(super) fn case(&self) -> &'static Case {
        let (Self::Run(case) | Self::Points(case) | Self::Fault(case, _)) = self;
        case
    }

    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let case = self.case().name;
        let value = match self {
            Self::Run(_) => json!({ "do": "run", "case": case }),
            Self::Points(_) => json!({ "do": "points", "case": case }),
            Self::Fault(_, Fault { thread, operation, index }) => {
                json!({ "do": "fault", "case": case, "thread": thread, "operation": operation, "index": index })
            }
        };
        send(&value, socket)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let value = read(message)?;
        let name = text(&value, "case")?;
        let case = cases().find(|case| case.name == name).ok_or_else(|| malformed("it names an unknown case"))?;
        Ok(match text(&value, "do")?.as_str() {
            "run" => Self::Run(case),
            "points" => Self::Points(case),
            "fault" => {
                let (thread, index) = (small(&value, "thread")?, small(&value, "index")?);
                Self::Fault(case, Fault { thread, operation: text(&value, "operation")?.into(), index })
            }
            _ => return Err(malformed("it asks for something unknown")),
        })
    }
}

fn status_to_json(status: &Status) -> Value {
    match status {
        Status::Failed(message) => json!({ "status": "failed", "text": cut(message) }),
        Status::Skipped(reason) => json!({ "status": "skipped", "text": reason }),
        // What was expected of a case is the runner's affair.
        _ => json!({ "status": "passed" }),
    }
}

fn status_of(value: &Value) -> io::Result<Status> {
    Ok(match text(value, "status")?.as_str() {
        "passed" => Status::Passed,
        "failed" => Status::Failed(text(value, "text")?),
        "skipped" => Status::Skipped(text(value, "text")?),
        _ => return Err(malformed("its status is unknown")),
    })
}

fn about_of(value: &Value) -> io::Result<About> {
    let versions = list(value, "versions")?.iter().map(|pair| Ok((text(pair, "what")?, text(pair, "version")?)));
    Ok(About {
        name: text(value, "name")?,
        description: text(value, "description")?,
        real_device: value["real_device"].as_bool().ok_or_else(|| malformed("it does not say whether it is real"))?,
        versions: versions.collect::<io::Result<_>>()?,
        devices: value["devices"].clone(),
    })
}

impl About {
    pub(super) fn to_json(&self) -> Value {
        let versions: Vec<Value> =
            self.versions.iter().map(|(what, version)| json!({ "what": what, "version": version })).collect();
        json!({
            "name": self.name,
            "description": self.description,
            "real_device": self.real_device,
            "versions": versions,
            "devices": self.devices,
        })
    }
}

impl Notice {
    pub(super) fn send(&self, socket: &UnixStream) -> io::Result<()> {
        let value = match self {
            Self::Ready(about) => json!({ "is": "ready", "about": about.to_json() }),
            Self::Failed { kind, message, hint } => {
                json!({ "is": "failed", "kind": kind, "message": cut(message), "hint": cut(hint) })
            }
            Self::Ended(status) => json!({ "is": "ended", "ended": status_to_json(status) }),
            Self::Points(Points::Not(status)) => json!({ "is": "no points", "ended": status_to_json(status) }),
            Self::Points(Points::Calls(calls)) => {
                let call = |Calls { thread, operation, count }: &Calls| json!({ "thread": thread, "operation": operation, "count": count });
                json!({ "is": "points", "calls": calls.iter().map(call).collect::<Vec<_>>() })
            }
            Self::Faulted(Faulted { status, reached, retried, findings }) => {
                let findings: Vec<&str> = findings.iter().map(|finding| cut(finding)).collect();
                let ended = status_to_json(status);
                json!({ "is": "faulted", "ended": ended, "reached": reached, "retried": retried, "findings": findings })
            }
        };
        send(&value, socket)
    }

    pub(super) fn read(message: &[u8]) -> io::Result<Self> {
        let value = read(message)?;
        Ok(match text(&value, "is")?.as_str() {
            "ready" => Self::Ready(about_of(&value["about"])?),
            "failed" => {
                let (kind, message) = (text(&value, "kind")?, text(&value, "message")?);
                Self::Failed { kind, message, hint: text(&value, "hint")? }
            }
            "ended" => Self::Ended(status_of(&value["ended"])?),
            "no points" => Self::Points(Points::Not(status_of(&value["ended"])?)),
            "points" => {
                let call = |call: &Value| -> io::Result<Calls> {
                    let (thread, count) = (small(call, "thread")?, small(call, "count")?);
                    Ok(Calls { thread, operation: text(call, "operation")?.into(), count })
                };
                Self::Points(Points::Calls(list(&value, "calls")?.iter().map(call).collect::<io::Result<_>>()?))
            }
            "faulted" => {
                let finding =
                    |text: &Value| text.as_str().map(str::to_owned).ok_or_else(|| malformed("a finding is no text"));
                Self::Faulted(Faulted {
                    status: status_of(&value["ended"])?,
                    reached: value["reached"].as_bool().unwrap_or_default(),
                    retried: number(&value, "retried")?,
                    findings: list(&value, "findings")?.iter().map(finding).collect::<io::Result<_>>()?,
                })
            }
            _ => return Err(malformed("it says something unknown")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::Inbox;
    use super::*;

    fn pair() -> (UnixStream, UnixStream) {
        UnixStream::pair().unwrap()
    }

    #[test]
    fn what_is_said_is_what_is_heard() {
        let case = cases().next().unwrap();
        let fault = Fault { thread: 1, operation: "copy".into(), index: 3 };
        let (here, there) = pair();
        let mut inbox = Inbox::default();
        for order in [Order::Run(case), Order::Points(case), Order::Fault(case, fault)] {
            order.send(&here).unwrap();
            let heard = Order::read(&inbox.wait(&there).unwrap().unwrap()).unwrap();
            assert_eq!(format!("{heard:?}"), format!("{order:?}"));
        }
        let about = About {
            name: "mock".into(),
            description: "a mock".into(),
            real_device: false,
            versions: vec![("mock".into(), "1".into())],
            devices: json!([{ "ordinal": 0 }]),
        };
        let calls = vec![Calls { thread: 0, operation: "host_free".into(), count: 7 }];
        let failed = Status::Failed("it \"was\" wrong".into());
        let faulted = Faulted {
            status: failed.clone(),
            reached: true,
            retried: 1,
            findings: vec!["a leak".into(), "two".into()],
        };
        let notices = [
            Notice::Ready(about),
            Notice::Failed { kind: "vendor error".into(), message: "no".into(), hint: String::new() },
            Notice::Ended(Status::Passed),
            Notice::Ended(failed),
            Notice::Points(Points::Not(Status::Skipped("lacks".into()))),
            Notice::Points(Points::Calls(calls)),
            Notice::Faulted(faulted),
        ];
        for notice in notices {
            notice.send(&here).unwrap();
            assert_eq!(Notice::read(&inbox.wait(&there).unwrap().unwrap()).unwrap(), notice);
        }
    }

    #[test]
    fn a_text_that_is_too_long_is_cut() {
        let (here, there) = pair();
        Notice::Ended(Status::Failed("ä".repeat(LONGEST_TEXT))).send(&here).unwrap();
        let heard = Notice::read(&Inbox::default().wait(&there).unwrap().unwrap()).unwrap();
        assert_eq!(heard, Notice::Ended(Status::Failed("ä".repeat(LONGEST_TEXT / 2))));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [&b""[..], &[TEXT], &[9], b"\x01\x02\0\0\0\0\0\0\0{}"] {
            assert!(Notice::read(bad).is_err() && Order::read(bad).is_err(), "{bad:?}");
        }
        let (here, there) = pair();
        send(&json!({ "do": "run", "case": "no such case" }), &here).unwrap();
        let error = Order::read(&Inbox::default().wait(&there).unwrap().unwrap()).unwrap_err();
        assert!(error.to_string().contains("unknown case"), "{error}");
    }
}
