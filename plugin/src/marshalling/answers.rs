//! Structs that the plugin answers with.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

use parking_lot::Mutex;

use super::super::codes::{Abilities, Coded, Facts};
use super::super::link::Link;
use super::super::raw::*;
use super::descriptors::{give_descriptor, take_descriptor};
use super::{Answer, Tags, bytes_of, choice, flag};
use highwater_hal::{
    Capabilities, DeviceInfo, DevicePtr, EventHandle, Identity, LiveObjects, MemoryHandle, MemoryInfo, MemoryRange,
    Transport, Transports,
};

/// Answers that are written behind a pointer: the plugin's lowering, and the program's lifting.
macro_rules! structs_out {
    ($($type:ty as $raw:ident: |$value:ident, $tags:ident| $lower:block, |$read:ident, $link:ident| $lift:block)*) => {$(
        impl Answer for $type {
            type Slot = $raw;
            fn empty() -> $raw {
                // SAFETY: any bytes are a value of the struct (`Sized64`).
                let mut empty: $raw = unsafe { std::mem::zeroed() };
                empty.size = bytes_of::<$raw>();
                empty
            }
            unsafe fn put(self, slot: *mut $raw, $tags: Tags) -> Result<(), String> {
                let _ = $tags;
                let $value = self;
                let raw: $raw = $lower;
                // SAFETY: the caller ensures it.
                unsafe { write_sized(slot, &raw) }
            }
            fn lift($read: $raw, $link: &Arc<Link>) -> Result<Self, String> {
                let _ = $link;
                if $read.size > bytes_of::<$raw>() {
                    return Err(format!("a `{}` of {} bytes, more than there was room for", <$raw as Sized64>::NAME, $read.size));
                }
                $lift
            }
            fn first() -> Option<$raw> {
                let first = <$raw as Sized64>::FIRST_BYTES;
                // SAFETY: any bytes are a value of the struct (`Sized64`).
                let mut slot: $raw = unsafe { MaybeUninit::zeroed().assume_init() };
                // SAFETY: the bytes behind the first version are part of the struct.
                unsafe { std::ptr::from_mut(&mut slot).cast::<u8>().add(first).write_bytes(BEHIND, size_of::<$raw>() - first) };
                slot.size = first as u64;
                (first < size_of::<$raw>()).then_some(slot)
            }
            fn check_first(slot: &$raw) -> Result<(), String> {
                let (name, first) = (<$raw as Sized64>::NAME, <$raw as Sized64>::FIRST_BYTES);
                if slot.size > first as u64 {
                    return Err(format!("a size of {} in a `{name}` of {first} bytes; expected are the bytes that were written", slot.size));
                }
                // SAFETY: every byte of the struct is initialized, because it has no padding (`Sized64`).
                let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(slot).cast::<u8>(), size_of::<$raw>()) };
                match bytes[first..].iter().position(|&byte| byte != BEHIND) {
                    None => Ok(()),
                    Some(place) => Err(format!("a byte at {} in a `{name}` of {first} bytes", first + place)),
                }
            }
        }
    )*};
}

/// A byte behind a short struct, which no call may change.
const BEHIND: u8 = 0xa5;

structs_out! {
    Identity as RawIdentity:
        |identity, tags| {
            let versions: Vec<String> = identity.versions.iter().map(|(what, version)| format!("{what}\t{version}")).collect();
            RawIdentity {
                size: bytes_of::<RawIdentity>(),
                real_device: u32::from(identity.real_device),
                reserved: 0,
                name: Text::new(&identity.name),
                description: Text::new(&identity.description),
                versions: Text::new(&versions.join("\n")),
                blas_workspace_variables: Text::new(&identity.blas_workspace_variables.join("\n")),
                lt_workspace_variables: Text::new(&identity.lt_workspace_variables.join("\n")),
            }
        },
        |raw, link| {
            let mut identity = Self::new(raw.name.read()?, raw.description.read()?, link.tag());
            identity.real_device = flag(raw.real_device, "`real_device`")?;
            let versions = raw.versions.read()?;
            let version = |line: &str| {
                let (what, version) = line.split_once('\t').ok_or_else(|| format!("the version `{line}` without a tab"))?;
                Ok::<_, String>((what.to_owned(), version.to_owned()))
            };
            identity.versions = versions.lines().map(version).collect::<Result<_, _>>()?;
            identity.blas_workspace_variables = names(&raw.blas_workspace_variables.read()?);
            identity.lt_workspace_variables = names(&raw.lt_workspace_variables.read()?);
            Ok(identity)
        }
    MemoryInfo as RawMemoryInfo:
        |info, tags| { RawMemoryInfo { size: bytes_of::<RawMemoryInfo>(), free: info.free, total: info.total } },
        |raw, link| { Ok(Self { free: raw.free, total: raw.total }) }
    MemoryRange as RawMemoryRange:
        |range, tags| {
            RawMemoryRange {
                size: bytes_of::<RawMemoryRange>(),
                base: range.base.get(),
                bytes: range.bytes as u64,
                kind: range.kind.code(),
                transports: bits_of(range.transports),
            }
        },
        |raw, link| {
            let range = Self::new(choice(raw.kind)?, DevicePtr::new(raw.base), raw.bytes as usize);
            Ok(range.with_transports(transports_of(raw.transports)))
        }
    LiveObjects as RawLiveObjects:
        |live, tags| {
            RawLiveObjects {
                size: bytes_of::<RawLiveObjects>(),
                streams: live.streams,
                events: live.events,
                handles: live.handles,
                allocations: live.allocations,
                host_allocations: live.host_allocations,
                graphs: live.graphs,
                mappings: live.mappings,
                descriptors: live.descriptors,
                shared_files: live.shared_files,
                reservations: live.reservations,
                physical_memory: live.physical_memory,
            }
        },
        |raw, link| {
            let mut live = Self::default();
            live.streams = raw.streams;
            live.events = raw.events;
            live.handles = raw.handles;
            live.allocations = raw.allocations;
            live.host_allocations = raw.host_allocations;
            live.graphs = raw.graphs;
            live.mappings = raw.mappings;
            live.descriptors = raw.descriptors;
            live.shared_files = raw.shared_files;
            live.reservations = raw.reservations;
            live.physical_memory = raw.physical_memory;
            Ok(live)
        }
    DeviceInfo as RawDeviceInfo:
        |info, tags| {
            RawDeviceInfo {
                size: bytes_of::<RawDeviceInfo>(),
                memory_bytes: info.memory_bytes,
                ordinal: info.ordinal,
                numa_node: info.numa_node.unwrap_or(0),
                has_numa_node: u32::from(info.numa_node.is_some()),
                reserved: 0,
                uuid: info.uuid,
                name: Text::new(&info.name),
                pci_address: Text::new(info.pci_address.as_deref().unwrap_or("")),
                architecture: Text::new(&info.architecture),
            }
        },
        |raw, link| {
            let mut info = Self::new(raw.ordinal, raw.name.read()?, raw.uuid, raw.memory_bytes);
            info.pci_address = Some(raw.pci_address.read()?).filter(|address| !address.is_empty());
            info.numa_node = flag(raw.has_numa_node, "`has_numa_node`")?.then_some(raw.numa_node);
            info.architecture = raw.architecture.read()?;
            Ok(info)
        }
    Capabilities as RawCapabilities:
        |capabilities, tags| {
            RawCapabilities {
                size: bytes_of::<RawCapabilities>(),
                abilities: Abilities::of(&capabilities),
                facts: Facts::of(&capabilities),
                ipc_transports: bits_of(capabilities.ipc_transports),
                reserved: 0,
                register_piece_bytes: capabilities.register_piece_bytes as u64,
                workspace_alignment: capabilities.workspace_alignment as u64,
                blas_workspace_bytes: capabilities.blas_workspace_bytes as u64,
                lt_workspace_bytes: capabilities.lt_workspace_bytes as u64,
                mapped_memory_granularity: capabilities.mapped_memory_granularity as u64,
            }
        },
        |raw, link| {
            if !raw.workspace_alignment.is_power_of_two() {
                return Err(format!("a `workspace_alignment` of {}; expected is a power of two", raw.workspace_alignment));
            }
            let mut capabilities = Self::none();
            Abilities::put(raw.abilities, &mut capabilities);
            Facts::put(raw.facts, &mut capabilities);
            capabilities.ipc_transports = transports_of(raw.ipc_transports);
            capabilities.register_piece_bytes = raw.register_piece_bytes as usize;
            capabilities.workspace_alignment = raw.workspace_alignment as usize;
            capabilities.blas_workspace_bytes = raw.blas_workspace_bytes as usize;
            capabilities.lt_workspace_bytes = raw.lt_workspace_bytes as usize;
            capabilities.mapped_memory_granularity = raw.mapped_memory_granularity as usize;
            Ok(capabilities)
        }
    MemoryHandle as RawMemoryHandle:
        |handle, tags| {
            let (descriptor, descriptor_token) = give_descriptor(handle.descriptor)?;
            RawMemoryHandle {
                size: bytes_of::<RawMemoryHandle>(),
                bytes: handle.bytes,
                transport: handle.transport.code(),
                descriptor,
                device_uuid: handle.device_uuid,
                payload: handle.payload,
                descriptor_token,
            }
        },
        |raw, link| {
            let descriptor = take_descriptor(raw.descriptor, raw.descriptor_token, link)?;
            let mut handle = Self::new(choice(raw.transport)?, raw.device_uuid, raw.bytes, raw.payload);
            handle.descriptor = descriptor;
            Ok(handle)
        }
    EventHandle as RawEventHandle:
        |handle, tags| {
            let (descriptor, descriptor_token) = give_descriptor(handle.descriptor)?;
            RawEventHandle {
                size: bytes_of::<RawEventHandle>(),
                descriptor,
                reserved: 0,
                device_uuid: handle.device_uuid,
                payload: handle.payload,
                descriptor_token,
            }
        },
        |raw, link| {
            let descriptor = take_descriptor(raw.descriptor, raw.descriptor_token, link)?;
            let mut handle = Self::new(raw.device_uuid, raw.payload);
            handle.descriptor = descriptor;
            Ok(handle)
        }
}

/// Returns a set of transports as bits.
fn bits_of(transports: Transports) -> u32 {
    let present = Transport::ALL.iter().filter(|transport| transports.contains(**transport));
    present.fold(0, |bits, transport| bits | 1 << transport.code())
}

/// Returns the known transports among these bits.
fn transports_of(bits: u32) -> Transports {
    let present = Transport::ALL.iter().copied().filter(|transport| bits & 1 << transport.code() != 0);
    present.fold(Transports::NONE, Transports::with)
}

/// Returns the lines of a text, for the life of the process. Each text is kept once, however often a backend is opened.
fn names(lines: &str) -> &'static [&'static str] {
    static KEPT: Mutex<BTreeMap<String, &'static [&'static str]>> = Mutex::new(BTreeMap::new());
    let mut kept = KEPT.lock();
    if let Some(names) = kept.get(lines) {
        return names;
    }
    let text: &'static str = Box::leak(lines.to_owned().into_boxed_str());
    let names: &'static [&'static str] = Box::leak(text.lines().collect());
    kept.insert(lines.to_owned(), names);
    names
}
