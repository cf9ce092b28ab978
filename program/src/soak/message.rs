//! The messages between the exporter and its consumers.

use std::io;

use super::super::frame::{Field, Frame, Payload, malformed, messages};
use super::pattern::Pattern;

messages! {
    /// A message of the exporter.
    enum Order {
        /// A shared buffer, which may be freed before the consumer opens it.
        1 Offer { ticket: Vec<u8>, pattern: Pattern },
    }
}

messages! {
    /// A step of a consumer.
    enum Deed {
        2 Opened,
        3 Released,
        /// A ticket was refused because the buffer is freed.
        4 Expired,
        /// A buffer still has its own contents.
        5 Checked,
        /// Work was enqueued and is not complete.
        6 Queued,
        /// No work is outstanding.
        7 Idle,
        /// A child process was started, which holds this many descriptors of the consumer.
        8 Bequeathed(descriptors: u64),
        /// This many sockets were shut down, and the open memory is still in use.
        9 Cut(sockets: u64),
        /// The contents of a buffer are not its own.
        10 Stolen(what: String),
        /// A call that must not fail has failed.
        11 Failed(what: String),
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
    fn offers_and_deeds_arrive_as_they_were_sent() {
        check_round_trip(&Order::Offer { ticket: vec![1, 2, 3], pattern: Pattern::new(77, 32) });
        let deeds = [
            Deed::Opened,
            Deed::Released,
            Deed::Expired,
            Deed::Checked,
            Deed::Queued,
            Deed::Idle,
            Deed::Bequeathed(9),
            Deed::Cut(2),
            Deed::Stolen("word 7".into()),
            Deed::Failed("open".into()),
        ];
        deeds.iter().for_each(check_round_trip);
        let no_side = [&[1][..], &[0; 8], &77_u64.to_le_bytes(), &33_u64.to_le_bytes()].concat();
        assert_eq!(decode::<Order>(&no_side).unwrap_err().to_string(), "33 is no side");
        assert!(decode::<Deed>(&[1]).is_err() && decode::<Order>(&[2]).is_err());
    }
}
