//! The messages between the runner and the process of the cases.
//!
//! The process sends [`Notice::Ready`] when it has opened the backend, else [`Notice::Failed`]. Then it answers each order
//! with one notice, and ends when the socket is closed.

use std::io;

use highwater_conformance::{Calls, Fault, Faulted, Points, Status};
use serde_json::{Value, json};

use super::super::failure::Explanation;
use super::super::frame::{Field, Frame, Payload, fields, malformed, messages};

messages! {
    /// A request of the runner.
    enum Order {
        /// Run the case of this name, which draws from this seed.
        1 Run(case: String, seed: u64),
        2 Points(case: String),
        3 Fault(case: String, fault: Fault),
    }
}

messages! {
    /// An answer of the process.
    enum Notice {
        4 Ready(about: About),
        5 Failed(why: Explanation),
        6 Ended(status: Status),
        7 Points(points: Points),
        8 Faulted(faulted: Faulted),
    }
}

/// The backend under test.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct About {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) real_device: bool,
    /// Of the backend and of each library, as `(what, version)`.
    pub(super) versions: Vec<(String, String)>,
    /// The devices, in the format of `doctor --json`.
    pub(super) devices: Value,
    /// The cells of the cases by construction, in the format of the certificate.
    pub(super) cells: Value,
}

fields!(About { name, description, real_device, versions, devices, cells });
fields!(Fault { thread, operation, index });
fields!(Calls { thread, operation, count });
fields!(Faulted { status, reached, retried, findings });

impl Order {
    pub(super) fn case(&self) -> &str {
        let (Self::Run(case, _) | Self::Points(case) | Self::Fault(case, _)) = self;
        case
    }
}

impl About {
    pub(super) fn device_count(&self) -> u32 {
        self.devices.as_array().map_or(0, |devices| u32::try_from(devices.len()).unwrap_or(u32::MAX))
    }

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

impl Field for Value {
    fn put(&self, frame: &mut Frame) {
        self.to_string().into_bytes().put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        serde_json::from_slice(&Vec::take(payload)?).map_err(|_| malformed("a field is not JSON"))
    }
}

impl Field for Status {
    fn put(&self, frame: &mut Frame) {
        let (status, text) = match self {
            Self::Failed(message) => (1, message.as_str()),
            Self::Skipped(reason) => (2, reason.as_str()),
            // The runner knows which failures are expected.
            _ => (0_u64, ""),
        };
        (status, text.to_owned()).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        match Field::take(payload)? {
            (0_u64, _) => Ok(Self::Passed),
            (1, message) => Ok(Self::Failed(message)),
            (2, reason) => Ok(Self::Skipped(reason)),
            (status, _) => Err(malformed(format!("{status} is not a status"))),
        }
    }
}

impl Field for Points {
    fn put(&self, frame: &mut Frame) {
        let (calls, status) = match self {
            Self::Calls(calls) => (Some(calls.clone()), None),
            Self::Not(status) => (None, Some(status.clone())),
        };
        (calls, status).put(frame);
    }

    fn take(payload: &mut Payload<'_>) -> io::Result<Self> {
        match Field::take(payload)? {
            (Some(calls), None) => Ok(Self::Calls(calls)),
            (None, Some(status)) => Ok(Self::Not(status)),
            _ => Err(malformed("it has neither calls nor a status")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::frame::decode;
    use super::super::super::frame::tests::check_round_trip;
    use super::*;

    #[test]
    fn orders_and_notices_arrive_as_they_were_sent_and_no_truncation_is_read() {
        let case = || "stream.order".to_owned();
        let fault = Fault { thread: 1, operation: "copy".into(), index: 3 };
        for order in [Order::Run(case(), 7), Order::Points(case()), Order::Fault(case(), fault)] {
            check_round_trip(&order);
        }
        let about = About {
            name: "mock".into(),
            description: "a mock".into(),
            real_device: false,
            versions: vec![("mock".into(), "1".into())],
            devices: json!([{ "ordinal": 0 }]),
            cells: json!([]),
        };
        let calls = vec![Calls { thread: 0, operation: "host_free".into(), count: 7 }];
        let failed = Status::Failed("it \"was\" wrong".into());
        let faulted = Faulted {
            status: failed.clone(),
            reached: true,
            retried: 1,
            findings: vec!["a leak".into(), "two".into()],
        };
        let why = Explanation { kind: Some("vendor error".into()), message: "no".into(), hint: String::new() };
        let notices = [
            Notice::Ready(about),
            Notice::Failed(why),
            Notice::Ended(Status::Passed),
            Notice::Ended(failed),
            Notice::Points(Points::Not(Status::Skipped("lacks".into()))),
            Notice::Points(Points::Calls(calls)),
            Notice::Faulted(faulted),
        ];
        notices.iter().for_each(check_round_trip);
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [&b""[..], &[1], &[6], &[9], b"\x06\x09\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert!(decode::<Notice>(bad).is_err() && decode::<Order>(bad).is_err(), "{bad:?}");
        }
    }
}
