//! Copies and fills.

use highwater_hal::{ErrorKind, FillPattern, Location, MemoryCopy, MemoryFill};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, Way, wrong};

mutants! {
    in "copy.exact":
    "copies-to-the-device-short": "Leaves out the last byte of copies to the device." =>
        |h| altered(h, |copy| copy.bytes -= usize::from(Way::of(copy) == Way::ToDevice && copy.bytes > 1));
    "copies-to-the-host-shifted": "Reads one byte too far in copies to the host." => |h| altered(h, |copy| {
        if Way::of(copy) == Way::ToHost && copy.bytes > 1 {
            copy.src = moved(copy.src, 1);
            copy.bytes -= 1;
        }
    });
    "copies-on-the-device-long": "Writes one byte beside copies within a device." =>
        |h| h.backend.copy(|reference, copy, stream| {
            reference.copy(copy, stream)?;
            if let (Way::OnDevice, Location::Device { device, ptr }, 1..) = (Way::of(copy), copy.dst, copy.bytes) {
                reference.overwrite(device, ptr.offset(copy.bytes), 1, stream);
            }
            Ok(())
        });
    "copies-to-the-host-move": "Clears the source of a copy to the host." => |h| h.backend.copy(|reference, copy, stream| {
        reference.copy(copy, stream)?;
        match (Way::of(copy), copy.src) {
            (Way::ToHost, Location::Device { device, ptr }) if device == stream.device() => {
                reference.overwrite(device, ptr, copy.bytes, stream);
            }
            _ => {}
        }
        Ok(())
    });
    "copies-between-devices-cut" needs [TWO_DEVICES, has::peer_copy]: "Copies 64 KiB between devices, and no more." => |h| altered(h, |copy| {
        if Way::of(copy) == Way::BetweenDevices {
            copy.bytes = copy.bytes.min(64 << 10);
        }
    });
    "copies-on-the-device-of-24-bits": "Keeps the low 24 bits of the size of copies within a device." => |h| altered(h, |copy| {
        if Way::of(copy) == Way::OnDevice {
            copy.bytes &= (1 << 24) - 1;
        }
    });
    "copies-to-the-device-cut-at-32-mebibytes": "Copies 32 MiB to the device, and no more." =>
        |h| altered(h, |copy| if Way::of(copy) == Way::ToDevice { copy.bytes = copy.bytes.min(32 << 20) });
    "copies-on-the-device-of-26-bits": "Keeps the low 26 bits of the size of copies within a device." =>
        |h| altered(h, |copy| if Way::of(copy) == Way::OnDevice { copy.bytes &= (1 << 26) - 1 });
    "copies-to-the-host-cut-at-64-mebibytes": "Copies 64 MiB to the host, and no more." =>
        |h| altered(h, |copy| if Way::of(copy) == Way::ToHost { copy.bytes = copy.bytes.min(64 << 20) });
    "copies-cut": "Copies 4 MiB, and no more." => |h| altered(h, |copy| copy.bytes = copy.bytes.min(4 << 20));

    in "copy.ordered":
    "copies-to-the-device-overtake": "Copies to the device ahead of the stream's earlier work." =>
        |h| overtake(h, Way::ToDevice);
    "copies-on-the-device-overtake": "Copies within a device ahead of the stream's earlier work." =>
        |h| overtake(h, Way::OnDevice);

    in "copy.zero":
    "copies-of-nothing-refused": "Refuses to copy 0 bytes." => |h| h.backend.copy(|reference, copy, stream| match copy.bytes {
        0 => Err(wrong(ErrorKind::InvalidArgument, "copy")),
        _ => reference.copy(copy, stream),
    });
    "copies-of-nothing-between-devices-refused" needs [TWO_DEVICES, has::peer_copy]: "Refuses to copy 0 bytes between devices." =>
        |h| h.backend.copy(|reference, copy, stream| match (copy.bytes, Way::of(copy)) {
            (0, Way::BetweenDevices) => Err(wrong(ErrorKind::InvalidArgument, "copy")),
            _ => reference.copy(copy, stream),
        });
    "copies-of-nothing-at-null-refused": "Refuses to copy 0 bytes from or to null." =>
        |h| h.backend.copy(|reference, copy, stream| {
            match copy.bytes {
                0 if is_null(copy.dst) || is_null(copy.src) => Err(wrong(ErrorKind::InvalidPointer, "copy")),
                _ => reference.copy(copy, stream),
            }
        });
    "copies-of-nothing-done": "Copies a byte instead of none." => |h| h.backend.copy(|reference, copy, stream| {
        // A backend that checks no address would end the process.
        let least = usize::from(!is_null(copy.dst) && !is_null(copy.src));
        let one = MemoryCopy::new(copy.dst, copy.src, copy.bytes.max(least));
        // At the end of a block there is no byte.
        reference.copy(&one, stream).or_else(|_| reference.copy(copy, stream))
    });

    in "fill.exact":
    "halves-swapped": "Swaps the bytes of patterns of 2 bytes." => |h| filled(h, |fill| {
        if let FillPattern::U16(value) = fill.pattern {
            fill.pattern = FillPattern::U16(value.swap_bytes());
        }
    });
    "words-of-one-byte": "Fills with the lowest byte of patterns of 4 bytes." => |h| filled(h, |fill| {
        if let FillPattern::U32(value) = fill.pattern {
            fill.pattern = FillPattern::U32((value & 0xff) * 0x0101_0101);
        }
    });
    "fills-count-bytes": "Takes the count of a fill as bytes." =>
        |h| filled(h, |fill| fill.count = fill.count.div_ceil(fill.pattern.bytes()));
    "fills-short": "Leaves out the last element of a fill." => |h| filled(h, |fill| fill.count -= usize::from(fill.count > 1));
    "fills-long": "Fills one element too many." => |h| h.backend.fill(|reference, fill, stream| {
        let more = MemoryFill::new(fill.device, fill.dst, fill.pattern, fill.count + usize::from(fill.count > 0));
        // At the end of a block there is none.
        reference.fill(&more, stream).or_else(|_| reference.fill(fill, stream))
    });

    "fills-of-24-bits": "Keeps the low 24 bits of the count of a fill." =>
        |h| filled(h, |fill| fill.count &= (1 << 24) - 1);
    "fills-cut-at-32-mebibytes": "Fills 32 MiB, and no more." =>
        |h| filled(h, |fill| fill.count = fill.count.min((32 << 20) / fill.pattern.bytes()));

    in "fill.ordered":
    "fills-overtake": "Fills ahead of the stream's earlier work." =>
        |h| h.backend.fill(|reference, fill, stream| match reference.is_pending(stream) {
            true => reference.on_own_stream(stream.device(), |own| reference.fill(fill, own)),
            false => reference.fill(fill, stream),
        });

    in "fill.zero":
    "fills-of-nothing-refused": "Refuses to fill 0 elements." =>
        |h| h.backend.fill(|reference, fill, stream| match fill.count {
            0 => Err(wrong(ErrorKind::InvalidArgument, "fill")),
            _ => reference.fill(fill, stream),
        });
    "fills-of-nothing-at-null-refused": "Refuses to fill 0 elements at null." =>
        |h| h.backend.fill(|reference, fill, stream| match (fill.count, fill.dst.get()) {
            (0, 0) => Err(wrong(ErrorKind::InvalidPointer, "fill")),
            _ => reference.fill(fill, stream),
        });
    "fills-of-nothing-done": "Fills an element instead of none." => |h| h.backend.fill(|reference, fill, stream| {
        let one = MemoryFill::new(fill.device, fill.dst, fill.pattern, fill.count.max(usize::from(fill.dst.get() != 0)));
        reference.fill(&one, stream).or_else(|_| reference.fill(fill, stream))
    });
}

fn altered(h: &mut Hooks, change: fn(&mut MemoryCopy)) {
    h.backend.copy(move |reference, copy, stream| {
        let mut copy = *copy;
        change(&mut copy);
        reference.copy(&copy, stream)
    });
}

fn filled(h: &mut Hooks, change: fn(&mut MemoryFill)) {
    h.backend.fill(move |reference, fill, stream| {
        let mut fill = *fill;
        change(&mut fill);
        reference.fill(&fill, stream)
    });
}

fn is_null(side: Location) -> bool {
    matches!(side, Location::Device { ptr, .. } if ptr.get() == 0)
}

fn moved(location: Location, bytes: usize) -> Location {
    match location {
        Location::Host(ptr) => Location::Host(ptr.offset(bytes)),
        Location::Device { device, ptr } => Location::Device { device, ptr: ptr.offset(bytes) },
    }
}

/// Copies one way at once where the stream is busy.
fn overtake(h: &mut Hooks, way: Way) {
    h.backend.copy(move |reference: &Reference, copy, stream| {
        match Way::of(copy) == way && reference.is_pending(stream) {
            true => reference.on_own_stream(stream.device(), |own| reference.copy(copy, own)),
            false => reference.copy(copy, stream),
        }
    });
}
