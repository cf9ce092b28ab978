//! Page-locked host memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::ptr::NonNull;

use highwater_hal::{ErrorKind, HostMemoryKind, HostOptions, HostPtr, Location};

use super::super::hooks::Hooks;
use super::super::reference::{Way, forgiven, is, renamed, wrong};
use super::super::state::Shared;

mutants! {
    in "host.usable":
    "host-blocks-short": "Page-locks one byte less than requested." => |h| {
        // The byte is there for the CPU, and copies do not reach it.
        let blocks = Shared::<HashMap<usize, usize>>::default();
        let (given, freed) = (blocks.clone(), blocks.clone());
        h.host.allocate(move |host, bytes, options| {
            let ptr = host.allocate(bytes, options)?;
            given.with(|blocks| blocks.insert(ptr.address(), ptr.address() + bytes));
            Ok(ptr)
        });
        h.host.free(move |host, ptr| {
            freed.with(|blocks| blocks.remove(&ptr.address()));
            host.free(ptr)
        });
        h.backend.copy(move |reference, copy, stream| {
            let is_last = |side| match side {
                Location::Host(ptr) => blocks.with(|blocks| blocks.values().any(|end| *end == ptr.address() + copy.bytes)),
                Location::Device { .. } => false,
            };
            if copy.bytes > 0 && (is_last(copy.dst) || is_last(copy.src)) {
                return Err(wrong(ErrorKind::InvalidPointer, "copy"));
            }
            reference.copy(copy, stream)
        });
    };
    "host-memory-of-one-device" needs [TWO_DEVICES]: "Copies page-locked memory to the first device only." =>
        |h| h.backend.copy(|reference, copy, stream| match Way::of(copy) == Way::ToDevice && stream.device() > 0 {
            true => reference.query_stream(stream).map(drop),
            false => reference.copy(copy, stream),
        });

    in "host.aligned":
    "host-addresses-off": "Gives addresses that are no multiple of 64." => |h| shift(h, 32, HostMemoryKind::Default);
    "write-combined-off" needs [has::write_combined]: "Gives write-combined memory at addresses that are no multiple of 64." =>
        |h| shift(h, 16, HostMemoryKind::WriteCombined);

    in "host.zero":
    "no-host-bytes-allocated": "Allocates 0 bytes of page-locked memory." =>
        |h| h.host.allocate(|host, bytes, options| host.allocate(bytes.max(1), options));

    in "host.exhausted":
    "host-exhausted-as-invalid": "Reports too many page-locked bytes as an invalid argument." =>
        |h| h.host.allocate(|host, bytes, options| {
            renamed(ErrorKind::OutOfMemory, ErrorKind::InvalidArgument, "allocate", host.allocate(bytes, options))
        });
    "refused-host-blocks-counted": "Counts page-locked blocks that it could not give." => |h| {
        let refused = Shared::new(0_u64);
        let seen = refused.clone();
        h.host.allocate(move |host, bytes, options| {
            let allocated = host.allocate(bytes, options);
            seen.set(seen.get() + u64::from(is(&allocated, ErrorKind::OutOfMemory)));
            allocated
        });
        h.count(move |live| live.host_allocations += refused.get());
    };

    in "host.free-counts":
    "host-blocks-kept": "Keeps page-locked memory that is freed." => |h| h.host.free(|_, _| Ok(()));

    in "host.register-copies":
    "one-page-registered": "Registers the first page of memory and none of the rest." =>
        |h| h.host.register(|host, ptr, bytes, options| host.register(ptr, bytes.min(4096), options));
    "registered-short": "Leaves the last byte out of a registration." =>
        |h| h.host.register(|host, ptr, bytes, options| host.register(ptr, bytes - usize::from(bytes > 1), options));

    in "host.register-overlap":
    "registered-twice": "Accepts memory that is already registered." => |h| {
        let starts = Shared::<HashSet<HostPtr>>::default();
        h.host.register(move |host, ptr, bytes, options| {
            let registered = host.register(ptr, bytes, options);
            let again = !starts.with(|starts| starts.insert(ptr));
            if again && is(&registered, ErrorKind::InvalidArgument) { Ok(()) } else { registered }
        });
    };
    "registered-inside": "Accepts a range that begins inside a registered one." => |h| {
        let starts = Shared::<HashSet<HostPtr>>::default();
        h.host.register(move |host, ptr, bytes, options| {
            let registered = host.register(ptr, bytes, options);
            let inside = starts.with(|starts| starts.insert(ptr));
            if inside && is(&registered, ErrorKind::InvalidArgument) { Ok(()) } else { registered }
        });
    };

    "allocated-blocks-registered": "Accepts ranges of its own blocks, and registers nothing." => |h| {
        let blocks = Shared::<BTreeMap<usize, usize>>::default();
        let given = blocks.clone();
        h.host.allocate(move |host, bytes, options| {
            let ptr = host.allocate(bytes, options)?;
            given.with(|given| given.insert(ptr.address(), bytes));
            Ok(ptr)
        });
        h.host.register(move |host, ptr, bytes, options| {
            let registered = host.register(ptr, bytes, options);
            let inside = blocks.with(|blocks| {
                blocks.range(..=ptr.address()).next_back().is_some_and(|(start, bytes)| ptr.address() < start + bytes)
            });
            if inside && is(&registered, ErrorKind::InvalidArgument) { Ok(()) } else { registered }
        });
    };

    in "host.register-apart":
    "whole-pages-registered": "Refuses a range in a page that has another registration." => |h| {
        let pages = live_registrations(h, false);
        h.host.register(move |host, ptr, bytes, options| {
            let range = ptr.address()..ptr.address() + bytes;
            match pages.with(|pages| pages.iter().any(|other| shares_page(other, &range))) {
                true => Err(wrong(ErrorKind::InvalidArgument, "register")),
                false => host.register(ptr, bytes, options).inspect(|()| pages.with(|pages| pages.push(range))),
            }
        });
    };
    "neighbors-refused": "Refuses a range that ends where another registration begins." => |h| {
        let live = live_registrations(h, false);
        h.host.register(move |host, ptr, bytes, options| {
            let range = ptr.address()..ptr.address() + bytes;
            match live.with(|live| live.iter().any(|other| other.start == range.end)) {
                true => Err(wrong(ErrorKind::InvalidArgument, "register")),
                false => host.register(ptr, bytes, options).inspect(|()| live.with(|live| live.push(range))),
            }
        });
    };
    "pages-unregistered": "Unregisters all ranges of a page with one of them." => |h| {
        let live = live_registrations(h, true);
        h.host.register(move |host, ptr, bytes, options| {
            host.register(ptr, bytes, options)?;
            live.with(|live| live.push(ptr.address()..ptr.address() + bytes));
            Ok(())
        });
    };

    "files-registered-once": "Refuses a second mapping of a file that it has registered." => |h| {
        let files = Shared::<BTreeMap<usize, String>>::default();
        let known = files.clone();
        h.host.register(move |host, ptr, bytes, options| {
            let Some(file) = file_at(ptr.address()) else { return host.register(ptr, bytes, options) };
            match known.with(|known| known.values().any(|other| *other == file)) {
                true => Err(wrong(ErrorKind::InvalidArgument, "register")),
                false => host.register(ptr, bytes, options).inspect(|()| {
                    known.with(|known| known.insert(ptr.address(), file));
                }),
            }
        });
        h.host.unregister(move |host, ptr| {
            host.unregister(ptr)?;
            files.with(|files| files.remove(&ptr.address()));
            Ok(())
        });
    };

    in "host.register-read-only":
    "read-only-memory-refused": "Refuses to register memory that the CPU may only read." =>
        |h| h.host.register(|host, ptr, bytes, options| match options.read_only {
            true => Err(wrong(ErrorKind::InvalidArgument, "register")),
            false => host.register(ptr, bytes, options),
        });
    "read-only-memory-forgotten": "Registers only the first page of memory that the CPU may only read." =>
        |h| h.host.register(|host, ptr, bytes, options| {
            host.register(ptr, if options.read_only { bytes.min(4096) } else { bytes }, options)
        });

    "short-read-only-memory-copied-once": "Copies memory for reading of 64 KiB at most when it is registered, and uses the copy." => |h| {
        let copied = Shared::<BTreeMap<usize, (usize, HostPtr)>>::default();
        let (made, gone, counted) = (copied.clone(), copied.clone(), copied.clone());
        h.host.register(move |host, ptr, bytes, options| {
            host.register(ptr, bytes, options)?;
            if options.read_only && bytes <= 1 << 16 {
                let copy = host.allocate(bytes, &HostOptions::new())?;
                // SAFETY: the suite promises that the range is readable, the block is that long, and no other code knows it.
                unsafe { ptr.as_ptr().copy_to_nonoverlapping(copy.as_ptr(), bytes) };
                made.with(|copied| copied.insert(ptr.address(), (bytes, copy)));
            }
            Ok(())
        });
        h.host.unregister(move |host, ptr| {
            host.unregister(ptr)?;
            gone.with(|copied| copied.remove(&ptr.address())).map_or(Ok(()), |(_, copy)| host.free(copy))
        });
        h.backend.copy(move |reference, copy, stream| {
            let Location::Host(ptr) = copy.src else { return reference.copy(copy, stream) };
            let known = copied.with(|copied| {
                let (start, (bytes, copy)) = copied.range(..=ptr.address()).next_back()?;
                let offset = ptr.address() - start;
                (offset < *bytes).then(|| copy.offset(offset))
            });
            let mut copy = *copy;
            copy.src = known.map_or(copy.src, Location::Host);
            reference.copy(&copy, stream)
        });
        h.count(move |live| live.host_allocations -= counted.with(|copied| copied.len() as u64));
    };
    "read-only-memory-made-writable": "Makes memory writable for the time of its registration, which sealed memory refuses." =>
        |h| h.host.register(|host, ptr, bytes, options| match options.read_only && !becomes_writable(ptr, bytes) {
            true => Err(wrong(ErrorKind::InvalidArgument, "register")),
            false => host.register(ptr, bytes, options),
        });
    "read-only-memory-written": "Writes a byte of memory that it registers for reading." =>
        |h| h.host.register(|host, ptr, bytes, options| {
            if options.read_only {
                with_writable(ptr, bytes, |ptr| {
                    // SAFETY: the page is writable during the call, and no device uses memory that is being registered.
                    unsafe { ptr.as_ptr().write(!ptr.as_ptr().read()) }
                });
            }
            host.register(ptr, bytes, options)
        });

    in "host.unregister-unknown":
    "anything-unregistered": "Unregisters memory that was never registered." =>
        |h| h.host.unregister(|host, ptr| forgiven(ErrorKind::InvalidPointer, host.unregister(ptr), ()));
    "unregistered-as-invalid": "Reports memory that was never registered as an invalid argument." =>
        |h| h.host.unregister(|host, ptr| {
            renamed(ErrorKind::InvalidPointer, ErrorKind::InvalidArgument, "unregister", host.unregister(ptr))
        });

    in "host.device-address":
    "device-addresses-off": "Gives the address of the next byte to devices." =>
        |h| h.host.device_address(|host, ptr, device| Ok(host.device_address(ptr, device)?.offset(1)));
    "device-addresses-in-a-window" needs [TWO_DEVICES]: "Shows page-locked memory to the second device at another address." =>
        |h| h.host.device_address(|host, ptr, device| {
            let address = host.device_address(ptr, device)?;
            Ok(if device > 0 { address.offset(1 << 40) } else { address })
        });
}

/// Returns whether two ranges have bytes in one page.
fn shares_page(one: &Range<usize>, other: &Range<usize>) -> bool {
    const PAGE: usize = 4096;
    one.start / PAGE <= (other.end - 1) / PAGE && other.start / PAGE <= (one.end - 1) / PAGE
}

/// Returns the registered ranges, to which the hook of `register` adds. If `takes_pages`, the end of a registration also ends
/// all that share a page with it.
fn live_registrations(h: &mut Hooks, takes_pages: bool) -> Shared<Vec<Range<usize>>> {
    let live = Shared::<Vec<Range<usize>>>::default();
    let taken = Shared::<HashSet<usize>>::default();
    let known = live.clone();
    h.host.unregister(move |host, ptr| {
        if taken.with(|taken| taken.remove(&ptr.address())) {
            return Ok(());
        }
        host.unregister(ptr)?;
        let along = known.with(|known| {
            let this = known.iter().find(|range| range.start == ptr.address()).cloned();
            let goes = |range: &Range<usize>| this.as_ref().is_some_and(|this| shares_page(this, range));
            let along: Vec<usize> = known.iter().filter(|range| goes(range)).map(|range| range.start).collect();
            known.retain(|range| range.start != ptr.address() && !(takes_pages && goes(range)));
            along
        });
        for start in along.into_iter().filter(|&start| takes_pages && start != ptr.address()) {
            let other = NonNull::new(ptr.as_ptr().wrapping_offset(start as isize - ptr.address() as isize));
            other.map_or(Ok(()), |other| host.unregister(HostPtr::new(other)))?;
            taken.with(|taken| taken.insert(start));
        }
        Ok(())
    });
    live
}

/// Frees memory of a kind at an offset in bytes from the start of its block.
fn shift(h: &mut Hooks, by: usize, kind: HostMemoryKind) {
    let moved = Shared::<HashSet<HostPtr>>::default();
    let given = moved.clone();
    h.host.allocate(move |host, bytes, options| {
        if bytes == 0 || options.kind != kind {
            return host.allocate(bytes, options);
        }
        let ptr = host.allocate(bytes.saturating_add(by), options)?.offset(by);
        given.with(|given| given.insert(ptr));
        Ok(ptr)
    });
    h.host.free(move |host, ptr| {
        let off = moved.with(|moved| moved.remove(&ptr));
        let start = NonNull::new(ptr.as_ptr().wrapping_sub(if off { by } else { 0 }));
        host.free(start.map_or(ptr, HostPtr::new))
    });
}

/// Returns the file that is mapped at an address: its device and its inode. `None` for memory without a file.
fn file_at(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let number = |text: &str| usize::from_str_radix(text, 16).ok();
    let line = maps.lines().find(|line| {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        range.is_some_and(|(start, end)| {
            number(start).zip(number(end)).is_some_and(|(start, end)| (start..end).contains(&address))
        })
    })?;
    let mut words = line.split_ascii_whitespace().skip(3);
    let (device, inode) = (words.next()?, words.next()?);
    (inode != "0").then(|| format!("{device} {inode}"))
}

/// Calls a function while the page at the start of memory for reading is writable. Returns whether it could be made so.
fn with_writable(ptr: HostPtr, bytes: usize, then: impl FnOnce(HostPtr)) -> bool {
    use rustix::mm::{MprotectFlags, mprotect};
    const PAGE: usize = 4096;
    let is_page = ptr.address().is_multiple_of(PAGE) && bytes >= PAGE;
    let protect = |flags| {
        // SAFETY: the page belongs to the range that the caller registers, and no other code writes or unmaps it meanwhile.
        unsafe { mprotect(ptr.as_ptr().cast(), PAGE, flags) }.is_ok()
    };
    if !is_page || !protect(MprotectFlags::READ | MprotectFlags::WRITE) {
        return false;
    }
    then(ptr);
    protect(MprotectFlags::READ)
}

/// Returns whether memory for reading can be made writable.
fn becomes_writable(ptr: HostPtr, bytes: usize) -> bool {
    with_writable(ptr, bytes, |_| {})
}
