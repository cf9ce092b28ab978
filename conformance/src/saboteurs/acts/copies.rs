//! Copies and fills.

use highwater_hal::{ErrorKind, FillPattern, Location, MemoryCopy, MemoryFill};

use super::super::Saboteur;
use super::super::honest::{Honest, Way, wrong};
use super::super::hooks::Hooks;

pub(super) const SABOTEURS: &[Saboteur] = &[
    Saboteur::new(
        "copies-to-the-device-short",
        "copy.exact",
        "Leaves out the last byte of copies to the device.",
        |h| {
            altered(h, |copy| copy.bytes -= usize::from(Way::of(copy) == Way::ToDevice && copy.bytes > 1));
        },
    ),
    Saboteur::new("copies-to-the-host-shifted", "copy.exact", "Reads one byte too far in copies to the host.", |h| {
        altered(h, |copy| {
            if Way::of(copy) == Way::ToHost && copy.bytes > 1 {
                copy.src = moved(copy.src, 1);
                copy.bytes -= 1;
            }
        });
    }),
    Saboteur::new("copies-on-the-device-long", "copy.exact", "Writes one byte beside copies within a device.", |h| {
        h.backend.copy(|honest, copy, stream| {
            honest.copy(copy, stream)?;
            if let (Way::OnDevice, Location::Device { device, ptr }, 1..) = (Way::of(copy), copy.dst, copy.bytes) {
                honest.smear(device, ptr.offset(copy.bytes), 1, stream);
            }
            Ok(())
        });
    }),
    Saboteur::new("copies-to-the-host-move", "copy.exact", "Clears the source of a copy to the host.", |h| {
        h.backend.copy(|honest, copy, stream| {
            honest.copy(copy, stream)?;
            match (Way::of(copy), copy.src) {
                (Way::ToHost, Location::Device { device, ptr }) if device == stream.device() => {
                    honest.smear(device, ptr, copy.bytes, stream);
                }
                _ => {}
            }
            Ok(())
        });
    }),
    Saboteur::new("copies-between-devices-cut", "copy.exact", "Copies 64 KiB between devices, and no more.", |h| {
        altered(h, |copy| {
            if Way::of(copy) == Way::BetweenDevices {
                copy.bytes = copy.bytes.min(64 << 10);
            }
        });
    }),
    Saboteur::new("copies-cut", "copy.exact", "Copies 4 MiB, and no more.", |h| {
        altered(h, |copy| copy.bytes = copy.bytes.min(4 << 20));
    }),
    Saboteur::new(
        "copies-to-the-device-overtake",
        "copy.ordered",
        "Copies to the device before what the stream has to do already.",
        |h| overtake(h, Way::ToDevice),
    ),
    Saboteur::new(
        "copies-on-the-device-overtake",
        "copy.ordered",
        "Copies within a device before what the stream has to do already.",
        |h| overtake(h, Way::OnDevice),
    ),
    Saboteur::new("copies-of-nothing-refused", "copy.zero", "Refuses to copy 0 bytes.", |h| {
        h.backend.copy(|honest, copy, stream| match copy.bytes {
            0 => Err(wrong(ErrorKind::InvalidArgument, "copy")),
            _ => honest.copy(copy, stream),
        });
    }),
    Saboteur::new("copies-of-nothing-done", "copy.zero", "Copies a byte where it should copy none.", |h| {
        h.backend.copy(|honest, copy, stream| {
            let one = MemoryCopy::new(copy.dst, copy.src, copy.bytes.max(1));
            // At the end of a block there is no byte.
            honest.copy(&one, stream).or_else(|_| honest.copy(copy, stream))
        });
    }),
    Saboteur::new("halves-swapped", "fill.exact", "Swaps the bytes of patterns of 2 bytes.", |h| {
        filled(h, |fill| {
            if let FillPattern::U16(value) = fill.pattern {
                fill.pattern = FillPattern::U16(value.swap_bytes());
            }
        });
    }),
    Saboteur::new("words-of-one-byte", "fill.exact", "Fills with the lowest byte of patterns of 4 bytes.", |h| {
        filled(h, |fill| {
            if let FillPattern::U32(value) = fill.pattern {
                fill.pattern = FillPattern::U32((value & 0xff) * 0x0101_0101);
            }
        });
    }),
    Saboteur::new("fills-count-bytes", "fill.exact", "Takes the count of a fill for bytes.", |h| {
        filled(h, |fill| fill.count = fill.count.div_ceil(fill.pattern.bytes()));
    }),
    Saboteur::new("fills-short", "fill.exact", "Leaves out the last element of a fill.", |h| {
        filled(h, |fill| fill.count -= usize::from(fill.count > 1));
    }),
    Saboteur::new("fills-long", "fill.exact", "Fills one element more than asked for.", |h| {
        h.backend.fill(|honest, fill, stream| {
            let more = MemoryFill::new(fill.device, fill.dst, fill.pattern, fill.count + usize::from(fill.count > 0));
            // At the end of a block there is none.
            honest.fill(&more, stream).or_else(|_| honest.fill(fill, stream))
        });
    }),
    Saboteur::new("fills-overtake", "fill.ordered", "Fills before what the stream has to do already.", |h| {
        h.backend.fill(|honest, fill, stream| match honest.is_busy(stream) {
            true => honest.aside(stream.device(), |aside| honest.fill(fill, aside)),
            false => honest.fill(fill, stream),
        });
    }),
    Saboteur::new("fills-of-nothing-refused", "fill.zero", "Refuses to fill 0 elements.", |h| {
        h.backend.fill(|honest, fill, stream| match fill.count {
            0 => Err(wrong(ErrorKind::InvalidArgument, "fill")),
            _ => honest.fill(fill, stream),
        });
    }),
    Saboteur::new("fills-of-nothing-done", "fill.zero", "Fills an element where it should fill none.", |h| {
        h.backend.fill(|honest, fill, stream| {
            let one = MemoryFill::new(fill.device, fill.dst, fill.pattern, fill.count.max(1));
            honest.fill(&one, stream).or_else(|_| honest.fill(fill, stream))
        });
    }),
];

fn altered(h: &mut Hooks, change: fn(&mut MemoryCopy)) {
    h.backend.copy(move |honest, copy, stream| {
        let mut copy = *copy;
        change(&mut copy);
        honest.copy(&copy, stream)
    });
}

fn filled(h: &mut Hooks, change: fn(&mut MemoryFill)) {
    h.backend.fill(move |honest, fill, stream| {
        let mut fill = *fill;
        change(&mut fill);
        honest.fill(&fill, stream)
    });
}

fn moved(location: Location, bytes: usize) -> Location {
    match location {
        Location::Host(ptr) => Location::Host(ptr.offset(bytes)),
        Location::Device { device, ptr } => Location::Device { device, ptr: ptr.offset(bytes) },
    }
}

/// Copies one way at once where the stream is busy.
fn overtake(h: &mut Hooks, way: Way) {
    h.backend.copy(move |honest: &Honest, copy, stream| match Way::of(copy) == way && honest.is_busy(stream) {
        true => honest.aside(stream.device(), |aside| honest.copy(copy, aside)),
        false => honest.copy(copy, stream),
    });
}
