//! The program's end of a plugin: the four traits over its table.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::link::Link;
use super::raw::RawHandle;
use super::table::Group;
use highwater_hal::{
    AtomicsMode, Backend, BlasHandle, BlasKind, BlasOptions, Capabilities, DevicePtr, Error, ErrorKind, Gemm,
    HostAllocator, HostOptions, HostPtr, Identity, IpcSharing, LiveObjects, MathMode, PlanArguments, PlanId,
    PlanOptions, Result, StreamId, Transports, Workspace,
};

/// A limit far above the devices of any process.
const MOST_DEVICES: u32 = 4096;

/// A backend in a plugin.
pub(super) struct Imported {
    link: Arc<Link>,
    identity: Identity,
    /// By ordinal. Read once.
    capabilities: Vec<Capabilities>,
    host: Arc<ImportedHost>,
    sharing: Option<Arc<ImportedSharing>>,
}

impl fmt::Debug for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("plugin", &self.link.plugin())
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl Imported {
    /// Reads the identity and the devices of a backend that was just opened. Calls `warn` for abilities without slots.
    pub(super) fn new(link: Link, warn: &mut dyn FnMut(String)) -> Result<Self> {
        let link = Arc::new(link);
        let count = count_devices(&link)?;
        link.set_devices(count);
        let identity = link.identity(link.backend())?;
        if identity.name.is_empty() {
            return Err(broken(&link, "identity", "no name"));
        }
        let mut capabilities = Vec::with_capacity(count as usize);
        for device in 0..count {
            let info = link.device_info(link.backend(), &device)?;
            if info.ordinal != device {
                return Err(broken(&link, "device_info", &format!("the ordinal {} for device {device}", info.ordinal)));
            }
            let claimed = link.capabilities(link.backend(), &device)?;
            let held = hold_to(&link, claimed);
            if held != claimed && device == 0 {
                warn(format!("claims abilities that its table has no slots for: {}", difference(&claimed, &held)));
            }
            capabilities.push(held);
        }
        let shares = capabilities.iter().any(|capabilities| !capabilities.ipc_transports.is_empty());
        let sharing = shares.then(|| Arc::new(ImportedSharing { link: Arc::clone(&link) }));
        let host = Arc::new(ImportedHost { link: Arc::clone(&link) });
        Ok(Self { link, identity, capabilities, host, sharing })
    }

    /// Returns the capabilities that were read at the opening.
    fn held_capabilities(&self, device: u32) -> Result<Capabilities> {
        self.link.check_process("capabilities")?;
        self.capabilities.get(device as usize).copied().ok_or_else(|| {
            let message = format!("there is no device {device}; there are {}", self.capabilities.len());
            Error::new(ErrorKind::InvalidArgument, "capabilities", message)
                .with_hint("ordinals count from 0 and are below `device_count()`")
        })
    }

    fn create_handle(&self, device: u32, options: &BlasOptions) -> Result<Box<dyn BlasHandle>> {
        let link = &self.link;
        let handle = link.create_handle(link.backend(), &device, options)?.0;
        Ok(Box::new(ImportedHandle { link: Arc::clone(link), handle, kind: options.kind, device }))
    }
}

/// Returns the number of devices that the plugin reports.
fn count_devices(link: &Arc<Link>) -> Result<u32> {
    match link.device_count(link.backend())? {
        0 => Err(Error::new(ErrorKind::DeviceMissing, "open", format!("the plugin `{}` has no device", link.plugin()))
            .with_hint("a backend without a device does not open")),
        count @ 1..=MOST_DEVICES => Ok(count),
        count => Err(broken(link, "device_count", &format!("{count} devices"))),
    }
}

fn broken(link: &Link, slot: &'static str, what: &str) -> Error {
    link.broken("open", slot, what)
}

/// Clears the abilities for which the table has no slots.
fn hold_to(link: &Link, mut capabilities: Capabilities) -> Capabilities {
    let has = |group| matches!(link.table().group(group), Ok(true));
    if !has(Group::Blas) {
        let c = &mut capabilities;
        (c.gemm_f32, c.gemm_f64, c.gemm_f16, c.gemm_bf16, c.gemm_mixed) = (false, false, false, false, false);
        (c.tf32, c.atomics_mode, c.blas_workspace, c.strided_batch) = (false, false, false, false);
    }
    capabilities.lt_plans &= has(Group::Blas) && has(Group::Lt);
    capabilities.capture &= has(Group::Capture);
    capabilities.event_timing &= has(Group::Timing);
    capabilities.foreign_objects &= has(Group::Foreign);
    capabilities.write_combined &= has(Group::Host);
    capabilities.host_register &= has(Group::Host) && has(Group::Register);
    capabilities.host_register_read_only &= capabilities.host_register;
    capabilities.foreign_memory &= has(Group::Adopt);
    capabilities.mapped_memory &= has(Group::Mapped) && capabilities.mapped_memory_granularity != 0;
    capabilities.mapped_memory_rdma &= capabilities.mapped_memory;
    if !capabilities.mapped_memory {
        capabilities.mapped_memory_granularity = 0;
    }
    if !has(Group::Ipc) {
        (capabilities.shareable_memory, capabilities.interprocess_events) = (false, false);
        capabilities.ipc_transports = Transports::NONE;
    }
    capabilities
}

/// Returns the names of the abilities that differ.
fn difference(claimed: &Capabilities, held: &Capabilities) -> String {
    use super::codes::Abilities;
    let bits = Abilities::of(claimed) & !Abilities::of(held);
    let mut names: Vec<String> = Abilities::NAMES
        .iter()
        .filter(|ability| bits & ability.value != 0)
        .map(|ability| ability.name.trim_start_matches("CAN_").to_lowercase())
        .collect();
    if claimed.ipc_transports != held.ipc_transports {
        names.push("ipc_transports".to_owned());
    }
    names.join(", ")
}

/// The answer of a method. The plugin gives it in the slot with the method's name, with three exceptions.
macro_rules! answer {
    ($imported:ident.capabilities($device:ident)) => {
        $imported.held_capabilities($device)
    };
    ($imported:ident.create_blas_handle($device:ident, $options:ident)) => {
        $imported.create_handle($device, $options)
    };
    ($imported:ident.copy_2d($copy:ident, $stream:ident)) => {
        if $imported.link.table().copy_2d.is_some() {
            $imported.link.copy_2d($imported.link.backend(), $copy, &$stream)
        } else {
            // SAFETY: each row lies inside the blocks of the whole copy, for which the caller promises the rest.
            $copy.in_rows(|row| unsafe { $imported.copy(row, $stream) })
        }
    };
    ($imported:ident.$method:ident($($argument:ident),*)) => {
        $imported.link.$method($imported.link.backend() $(, &$argument)*)
    };
}

macro_rules! methods {
    ($($variant:ident: [$($fn:tt)+] $method:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        $($fn)+ $method(&self $(, $argument: $type)*) -> Result<$answer> {
            answer!(self.$method($($argument),*))
        }
    )*};
}

macro_rules! imported {
    (Backend { $($backend:tt)* } BlasHandle { $($h:tt)* } HostAllocator { $($a:tt)* } IpcSharing { $($sharing:tt)* }) => {
        // SAFETY: every call goes to the plugin, and its answer goes to core. The loader of the plugin vouches for its clauses.
        unsafe impl Backend for Imported {
            fn identity(&self) -> &Identity {
                &self.identity
            }

            fn device_count(&self) -> u32 {
                self.link.devices()
            }

            fn live_objects(&self) -> LiveObjects {
                self.link.or_unseen(self.link.live_objects(self.link.backend()))
            }

            fn is_exiting(&self) -> bool {
                highwater_hal::exit::has_begun() || self.link.or_unseen(self.link.is_exiting(self.link.backend()))
            }

            fn host_allocator(&self) -> Arc<dyn HostAllocator> {
                Arc::clone(&self.host) as Arc<dyn HostAllocator>
            }

            fn ipc_sharing(&self) -> Option<Arc<dyn IpcSharing>> {
                self.sharing.as_ref().map(|sharing| Arc::clone(sharing) as Arc<dyn IpcSharing>)
            }

            methods! { $($backend)* }
        }

        impl IpcSharing for ImportedSharing {
            methods! { $($sharing)* }
        }
    };
}
highwater_hal::for_each_operation!(imported);

/// A handle in a plugin.
#[derive(Debug)]
struct ImportedHandle {
    link: Arc<Link>,
    handle: NonNull<RawHandle>,
    kind: BlasKind,
    device: u32,
}

// SAFETY: the pointer is only passed to the table's functions for handles, which any thread may call, one at a time (the
// table's contract).
unsafe impl Send for ImportedHandle {}

impl BlasHandle for ImportedHandle {
    fn kind(&self) -> BlasKind {
        self.kind
    }

    fn device(&self) -> u32 {
        self.device
    }

    fn set_stream(&mut self, stream: StreamId) -> Result<()> {
        self.link.handle_set_stream(self.handle.as_ptr(), &stream)
    }

    unsafe fn set_workspace(&mut self, workspace: Option<Workspace>) -> Result<()> {
        self.link.handle_set_workspace(self.handle.as_ptr(), &workspace)
    }

    fn set_math_mode(&mut self, mode: MathMode) -> Result<()> {
        self.link.handle_set_math_mode(self.handle.as_ptr(), &mode)
    }

    fn set_atomics_mode(&mut self, mode: AtomicsMode) -> Result<()> {
        self.link.handle_set_atomics_mode(self.handle.as_ptr(), &mode)
    }

    unsafe fn gemm(&mut self, gemm: &Gemm) -> Result<()> {
        self.link.handle_gemm(self.handle.as_ptr(), gemm)
    }

    fn create_plan(&mut self, options: &PlanOptions) -> Result<PlanId> {
        self.link.create_plan(self.handle.as_ptr(), options)
    }

    unsafe fn run_plan(&mut self, plan: PlanId, arguments: &PlanArguments) -> Result<()> {
        self.link.run_plan(self.handle.as_ptr(), &plan, arguments)
    }

    fn destroy_plan(&mut self, plan: PlanId) -> Result<()> {
        self.link.destroy_plan(self.handle.as_ptr(), &plan)
    }

    fn raw(&self) -> u64 {
        self.link.or_unseen(self.link.handle_raw(self.handle.as_ptr()))
    }

    fn reset(&mut self) -> Result<()> {
        self.link.handle_reset(self.handle.as_ptr())
    }

    fn destroy(&mut self) -> Result<()> {
        self.link.handle_destroy(self.handle.as_ptr())
    }
}

impl Drop for ImportedHandle {
    fn drop(&mut self) {
        // If the plugin may not be called any more, the handle lives until the process ends, as those of built-in backends do.
        if let Err(error) = self.link.handle_close(self.handle.as_ptr())
            && !matches!(error.kind(), ErrorKind::ShuttingDown | ErrorKind::Forked)
        {
            tracing::warn!("a handle could not be closed: {error}");
        }
    }
}

/// The page-locked memory of a plugin.
#[derive(Debug)]
struct ImportedHost {
    link: Arc<Link>,
}

// SAFETY: as for `Imported`. The marshalling checks that blocks are not null and are aligned.
unsafe impl HostAllocator for ImportedHost {
    fn allocate(&self, bytes: usize, options: &HostOptions) -> Result<HostPtr> {
        self.link.host_allocate(self.link.backend(), &bytes, options)
    }

    unsafe fn free(&self, ptr: HostPtr) -> Result<()> {
        self.link.host_free(self.link.backend(), &ptr)
    }

    unsafe fn register(&self, ptr: HostPtr, bytes: usize, options: &HostOptions) -> Result<()> {
        self.link.host_register(self.link.backend(), &ptr, &bytes, options)
    }

    unsafe fn unregister(&self, ptr: HostPtr) -> Result<()> {
        self.link.host_unregister(self.link.backend(), &ptr)
    }

    fn device_address(&self, ptr: HostPtr, device: u32) -> Result<DevicePtr> {
        self.link.host_device_address(self.link.backend(), &ptr, &device)
    }
}

/// The sharing of a plugin.
#[derive(Debug)]
struct ImportedSharing {
    link: Arc<Link>,
}
