//! Structs that the program passes to the plugin.

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use super::super::codes::{
    Coded, LOCATION_DEVICE, LOCATION_HOST, MEMORY_PLAIN, MEMORY_SHAREABLE, MEMORY_STREAM_ORDERED, split_kind,
};
use super::super::raw::*;
use super::descriptors::{lift_descriptor, raw_descriptor};
use super::values::{NO_ID, lift_id, raw_id};
use super::{Argument, Longer, Tags, UNKNOWN_BYTES, Wrong, bytes_of, choice, flag};
use highwater_hal::{
    AllocateOptions, CopyShape, DataType, DeviceMemoryKind, DevicePtr, EventHandle, EventOptions, FillPattern, Gemm,
    GemmShape, HostOptions, HostPtr, Location, MemoryCopy, MemoryCopy2d, MemoryFill, MemoryHandle,
    PhysicalMemoryOptions, PlanArguments, PlanOptions, StreamOptions, StridedBatch, Transpose, Workspace,
};

/// Arguments that are passed by pointer: the program's lowering, and the plugin's lifting.
macro_rules! structs_in {
    ($($type:ty as $raw:ty: |$value:ident| $lower:expr, |$read:ident, $tags:ident| $lift:block)*) => {$(
        impl Argument for $type {
            type Form = $raw;
            type Abi = *const $raw;
            #[inline]
            fn form(&self) -> $raw {
                let $value = self;
                $lower
            }
            #[inline]
            fn abi(form: &$raw) -> *const $raw {
                form
            }
            const IS_STRUCT: bool = true;
            fn longer_abi(form: &$raw, byte: u8, room: &mut MaybeUninit<Longer<$raw>>) -> *const $raw {
                let mut known = *form;
                known.size += UNKNOWN_BYTES as u64;
                let longer = room.write(Longer { known, unknown: [byte; UNKNOWN_BYTES] });
                std::ptr::from_mut(longer).cast_const().cast()
            }
            #[inline]
            unsafe fn lift(abi: *const $raw, $tags: Tags) -> Result<Self, Wrong> {
                let mut spare = MaybeUninit::uninit();
                // SAFETY: the caller ensures it.
                let $read = unsafe { read_sized(abi, &mut spare) }?;
                let _ = $tags;
                $lift
            }
        }
    )*};
}

structs_in! {
    StreamOptions as RawStreamOptions:
        |options| RawStreamOptions { size: bytes_of::<RawStreamOptions>(), priority: options.priority.code(), reserved: 0 },
        |raw, tags| { Ok(Self::new().with_priority(choice(raw.priority)?)) }
    EventOptions as RawEventOptions:
        |options| RawEventOptions {
            size: bytes_of::<RawEventOptions>(),
            timing: u32::from(options.timing),
            interprocess: u32::from(options.interprocess),
        },
        |raw, tags| {
            let (timing, interprocess) = (flag(raw.timing, "`timing`")?, flag(raw.interprocess, "`interprocess`")?);
            let mut options = Self::new();
            (options.timing, options.interprocess) = (timing, interprocess);
            Ok(options)
        }
    AllocateOptions as RawAllocateOptions:
        |options| {
            let (kind, transport, stream) = split_kind(options.kind);
            RawAllocateOptions {
                size: bytes_of::<RawAllocateOptions>(),
                bytes: options.bytes as u64,
                kind,
                transport: transport.map_or(0, Coded::code),
                stream: stream.map_or(NO_ID, raw_id),
            }
        },
        |raw, tags| {
            let kind = match raw.kind {
                MEMORY_PLAIN => DeviceMemoryKind::Plain,
                MEMORY_SHAREABLE => DeviceMemoryKind::Shareable(choice(raw.transport)?),
                MEMORY_STREAM_ORDERED => DeviceMemoryKind::StreamOrdered(lift_id(raw.stream, tags)?),
                other => return Err(format!("{other} for a kind of device memory").into()),
            };
            Ok(Self::new(raw.bytes as usize).with_kind(kind))
        }
    PhysicalMemoryOptions as RawPhysicalMemoryOptions:
        |options| RawPhysicalMemoryOptions {
            size: bytes_of::<RawPhysicalMemoryOptions>(),
            bytes: options.bytes as u64,
            shareable: u32::from(options.shareable.is_some()),
            transport: options.shareable.map_or(0, Coded::code),
            rdma: u32::from(options.rdma),
            reserved: 0,
        },
        |raw, tags| {
            let (shareable, rdma) = (flag(raw.shareable, "`shareable`")?, flag(raw.rdma, "`rdma`")?);
            let mut options = Self::new(raw.bytes as usize);
            options.shareable = if shareable { Some(choice(raw.transport)?) } else { None };
            options.rdma = rdma;
            Ok(options)
        }
    HostOptions as RawHostOptions:
        |options| RawHostOptions {
            size: bytes_of::<RawHostOptions>(),
            kind: options.kind.code(),
            reserved: 0,
            read_only: u32::from(options.read_only),
            reserved_2: 0,
        },
        |raw, tags| {
            let read_only = flag(raw.read_only, "`read_only`")?;
            Ok(Self::new().with_kind(choice(raw.kind)?).with_read_only(read_only))
        }
    MemoryCopy as RawMemoryCopy:
        |copy| RawMemoryCopy {
            size: bytes_of::<RawMemoryCopy>(),
            dst: raw_location(copy.dst),
            src: raw_location(copy.src),
            bytes: copy.bytes as u64,
        },
        |raw, tags| { Ok(Self::new(lift_location(raw.dst)?, lift_location(raw.src)?, raw.bytes as usize)) }
    MemoryCopy2d as RawMemoryCopy2d:
        |copy| RawMemoryCopy2d {
            size: bytes_of::<RawMemoryCopy2d>(),
            dst: raw_location(copy.dst),
            src: raw_location(copy.src),
            width: copy.shape.width as u64,
            height: copy.shape.height as u64,
            src_pitch: copy.shape.src_pitch as u64,
            dst_pitch: copy.shape.dst_pitch as u64,
        },
        |raw, tags| {
            let shape = CopyShape::new(raw.width as usize, raw.height as usize)
                .with_src_pitch(raw.src_pitch as usize)
                .with_dst_pitch(raw.dst_pitch as usize);
            Ok(Self::new(lift_location(raw.dst)?, lift_location(raw.src)?, shape))
        }
    MemoryFill as RawMemoryFill:
        |fill| RawMemoryFill {
            size: bytes_of::<RawMemoryFill>(),
            dst: fill.dst.get(),
            count: fill.count as u64,
            device: fill.device,
            pattern_bytes: fill.pattern.bytes() as u32,
            pattern: match fill.pattern {
                FillPattern::U8(byte) => u32::from(byte),
                FillPattern::U16(half) => u32::from(half),
                FillPattern::U32(word) => word,
            },
            reserved: 0,
        },
        |raw, tags| {
            let too_large = || format!("the element {:#x} for {} bytes", raw.pattern, raw.pattern_bytes);
            let pattern = match raw.pattern_bytes {
                1 => FillPattern::U8(raw.pattern.try_into().map_err(|_| too_large())?),
                2 => FillPattern::U16(raw.pattern.try_into().map_err(|_| too_large())?),
                4 => FillPattern::U32(raw.pattern),
                other => return Err(format!("an element of {other} bytes; expected are 1, 2 or 4").into()),
            };
            Ok(Self::new(raw.device, DevicePtr::new(raw.dst), pattern, raw.count as usize))
        }
    Gemm as RawGemm:
        |gemm| RawGemm {
            size: bytes_of::<RawGemm>(),
            shape: raw_shape(&gemm.shape),
            alpha: gemm.alpha,
            beta: gemm.beta,
            a: gemm.a.get(),
            b: gemm.b.get(),
            c: gemm.c.get(),
        },
        |raw, tags| {
            let shape = lift_shape(&raw.shape)?;
            let (a, b, c) = (DevicePtr::new(raw.a), DevicePtr::new(raw.b), DevicePtr::new(raw.c));
            Ok(Self::new(shape, a, b, c).with_scale(raw.alpha, raw.beta))
        }
    Option<Workspace> as RawWorkspace:
        |workspace| RawWorkspace {
            size: bytes_of::<RawWorkspace>(),
            address: workspace.map_or(0, |workspace| workspace.ptr.get()),
            bytes: workspace.map_or(0, |workspace| workspace.bytes as u64),
            present: u32::from(workspace.is_some()),
            reserved: 0,
        },
        |raw, tags| {
            let workspace = Workspace { ptr: DevicePtr::new(raw.address), bytes: raw.bytes as usize };
            Ok(flag(raw.present, "`present`")?.then_some(workspace))
        }
    PlanOptions as RawPlanOptions:
        |options| RawPlanOptions {
            size: bytes_of::<RawPlanOptions>(),
            shape: raw_shape(&options.shape),
            workspace_bytes: options.workspace_bytes as u64,
            alignment: options.alignment as u64,
            epilogue: options.epilogue.code(),
            math_mode: options.math_mode.code(),
            atomics_mode: options.atomics_mode.code(),
            reserved: 0,
        },
        |raw, tags| {
            let shape = lift_shape(&raw.shape)?;
            Ok(Self::new(shape, choice(raw.epilogue)?, raw.workspace_bytes as usize)
                .with_alignment(raw.alignment as usize)
                .with_math_mode(choice(raw.math_mode)?)
                .with_atomics_mode(choice(raw.atomics_mode)?))
        }
    PlanArguments as RawPlanArguments:
        |arguments| RawPlanArguments {
            size: bytes_of::<RawPlanArguments>(),
            alpha: arguments.alpha,
            beta: arguments.beta,
            a: arguments.a.get(),
            b: arguments.b.get(),
            c: arguments.c.get(),
            d: arguments.d.get(),
            bias: arguments.bias.map_or(0, DevicePtr::get),
            has_bias: u32::from(arguments.bias.is_some()),
            reserved: 0,
        },
        |raw, tags| {
            let bias = flag(raw.has_bias, "`has_bias`")?.then_some(DevicePtr::new(raw.bias));
            let (a, b, d) = (DevicePtr::new(raw.a), DevicePtr::new(raw.b), DevicePtr::new(raw.d));
            let mut arguments = Self::new(a, b, d, bias);
            (arguments.alpha, arguments.beta, arguments.c) = (raw.alpha, raw.beta, DevicePtr::new(raw.c));
            Ok(arguments)
        }
    MemoryHandle as RawMemoryHandle:
        |handle| RawMemoryHandle {
            size: bytes_of::<RawMemoryHandle>(),
            bytes: handle.bytes,
            transport: handle.transport.code(),
            descriptor: raw_descriptor(handle.descriptor.as_ref()),
            device_uuid: handle.device_uuid,
            payload: handle.payload,
            descriptor_token: 0,
        },
        |raw, tags| {
            let mut handle = Self::new(choice(raw.transport)?, raw.device_uuid, raw.bytes, raw.payload);
            handle.descriptor = lift_descriptor(raw.descriptor)?;
            Ok(handle)
        }
    EventHandle as RawEventHandle:
        |handle| RawEventHandle {
            size: bytes_of::<RawEventHandle>(),
            descriptor: raw_descriptor(handle.descriptor.as_ref()),
            reserved: 0,
            device_uuid: handle.device_uuid,
            payload: handle.payload,
            descriptor_token: 0,
        },
        |raw, tags| {
            let mut handle = Self::new(raw.device_uuid, raw.payload);
            handle.descriptor = lift_descriptor(raw.descriptor)?;
            Ok(handle)
        }
}

fn raw_location(location: Location) -> RawLocation {
    match location {
        Location::Host(ptr) => {
            RawLocation { kind: LOCATION_HOST, device: 0, address: ptr.as_ptr().expose_provenance() as u64 }
        }
        Location::Device { device, ptr } => RawLocation { kind: LOCATION_DEVICE, device, address: ptr.get() },
    }
}

fn lift_location(raw: RawLocation) -> Result<Location, String> {
    match raw.kind {
        LOCATION_HOST => {
            let address = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(raw.address as usize));
            Ok(Location::Host(HostPtr::new(address.ok_or("a null pointer for host memory")?)))
        }
        LOCATION_DEVICE => Ok(Location::Device { device: raw.device, ptr: DevicePtr::new(raw.address) }),
        other => Err(format!("{other} for the side of a copy")),
    }
}

#[inline]
fn raw_shape(shape: &GemmShape) -> RawGemmShape {
    let batch = shape.batch.unwrap_or(StridedBatch { count: 0, stride_a: 0, stride_b: 0, stride_c: 0 });
    RawGemmShape {
        data_type: shape.data_type.code(),
        output: shape.output.code(),
        transpose_a: u32::from(shape.transpose_a == Transpose::Yes),
        transpose_b: u32::from(shape.transpose_b == Transpose::Yes),
        m: shape.m as u64,
        n: shape.n as u64,
        k: shape.k as u64,
        lda: shape.lda as u64,
        ldb: shape.ldb as u64,
        ldc: shape.ldc as u64,
        has_batch: u32::from(shape.batch.is_some()),
        reserved: 0,
        batch_count: batch.count as u64,
        stride_a: batch.stride_a as u64,
        stride_b: batch.stride_b as u64,
        stride_c: batch.stride_c as u64,
    }
}

/// Lifts a shape. Inlined, because moving a `Result` of the whole shape costs more than the rest of a call.
#[inline(always)]
fn lift_shape(raw: &RawGemmShape) -> Result<GemmShape, String> {
    let flags = [raw.transpose_a, raw.transpose_b, raw.has_batch].iter().all(|flag| *flag <= 1);
    let (true, Some(data_type), Some(output)) = (flags, DataType::of(raw.data_type), DataType::of(raw.output)) else {
        return Err(wrong_shape(raw));
    };
    let transposed = |flag| if flag == 0 { Transpose::No } else { Transpose::Yes };
    let batch = StridedBatch {
        count: raw.batch_count as usize,
        stride_a: raw.stride_a as usize,
        stride_b: raw.stride_b as usize,
        stride_c: raw.stride_c as usize,
    };
    let mut shape = GemmShape::new(data_type, raw.m as usize, raw.n as usize, raw.k as usize);
    shape.output = output;
    shape.transpose_a = transposed(raw.transpose_a);
    shape.transpose_b = transposed(raw.transpose_b);
    shape.lda = raw.lda as usize;
    shape.ldb = raw.ldb as usize;
    shape.ldc = raw.ldc as usize;
    shape.batch = (raw.has_batch == 1).then_some(batch);
    Ok(shape)
}

/// Returns the fault of an invalid shape.
#[cold]
fn wrong_shape(raw: &RawGemmShape) -> String {
    let types = choice::<DataType>(raw.data_type).and(choice::<DataType>(raw.output)).map(drop);
    let flags = flag(raw.transpose_a, "`transpose_a`").and(flag(raw.transpose_b, "`transpose_b`")).map(drop);
    let batch = flag(raw.has_batch, "`has_batch`").map(drop);
    types.and(flags).and(batch).err().unwrap_or_default()
}
