//! The options of a mock: devices, memory, latencies, capabilities, and faults.

use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::time::Duration;

use highwater_hal::numbers::{Abilities, Coded, Constant, Facts};
use highwater_hal::{Capabilities, Error, ErrorKind, Result, Transport, Transports, display_foreign};

use crate::arena::Quarantine;
use crate::calls::MILLION;
use crate::operation::{Operation, did_you_mean};
use crate::sealed_file::page_bytes;

/// The environment variable that [`MockOptions::from_environment`] reads.
pub const ENVIRONMENT_VARIABLE: &str = "HIGHWATER_MOCK";

/// The size of the pages of device memory.
const PAGE: u64 = 4096;
const MAX_DEVICES: u32 = 64;
/// Far less than on hardware, so that blocks of a few megabytes have several pieces.
const REGISTER_PIECE_BYTES: usize = 4 << 20;
/// Far less than on hardware, so that small devices have many pieces. A multiple of every system's page.
const MAPPED_MEMORY_GRANULARITY: usize = 64 << 10;
/// A larger device would need too large a page table.
const MAX_MEMORY_BYTES: u64 = 1 << 42;
/// The longest time that a text may set. A longer one is a slip of the pen, and hangs the program.
const LONGEST_TIME: Duration = Duration::from_secs(3600);

/// The options with which a [`MockGpu`](crate::MockGpu) opens.
///
/// ```
/// use std::time::Duration;
/// use highwater_hal::ErrorKind;
/// use highwater_mock::{MockGpu, MockOptions, Operation};
///
/// let options = MockOptions::new()
///     .with_devices(2)
///     .with_memory_bytes(64 << 20)
///     .with_latency(Duration::from_micros(50))
///     .with_capabilities(|capabilities| capabilities.peer_copy = false)
///     .with_faults(Operation::Allocate, 3.., ErrorKind::OutOfMemory);
/// let gpu = MockGpu::open(options)?;
/// # Ok::<(), highwater_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MockOptions {
    pub(crate) devices: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) host_memory_bytes: u64,
    pub(crate) latency: Duration,
    pub(crate) create_handle_latency: BTreeMap<u32, Duration>,
    pub(crate) first_handle_latency: Duration,
    pub(crate) gemm_gap: Duration,
    pub(crate) capabilities: Capabilities,
    /// Operations, and the numbers of their calls that fail.
    faults: Vec<(String, RangeInclusive<u64>, ErrorKind)>,
    chances: Vec<(String, u32, ErrorKind)>,
    pub(crate) seed: u64,
    pub(crate) quarantine: Quarantine,
    pub(crate) checks: bool,
    pub(crate) race_detector: bool,
    pub(crate) thread_races: bool,
    /// Whether the mock prints its races to standard error at the end.
    pub(crate) prints_races: bool,
    pub(crate) schedule: Option<u64>,
    pub(crate) held: bool,
}

impl Default for MockOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl MockOptions {
    /// Returns the default: one device of 4 GiB without latency, with every ability that the mock has. Page-locked
    /// memory is limited by the machine's physical memory.
    #[must_use]
    pub fn new() -> Self {
        Self {
            devices: 1,
            memory_bytes: 4 << 30,
            host_memory_bytes: physical_memory_bytes(),
            latency: Duration::ZERO,
            create_handle_latency: BTreeMap::new(),
            first_handle_latency: Duration::ZERO,
            gemm_gap: Duration::ZERO,
            capabilities: default_capabilities(),
            faults: Vec::new(),
            chances: Vec::new(),
            seed: 0,
            quarantine: Quarantine::default(),
            checks: false,
            race_detector: false,
            thread_races: false,
            prints_races: false,
            schedule: None,
            held: false,
        }
    }

    /// Sets the number of devices, 1 to 64.
    #[must_use]
    pub fn with_devices(mut self, devices: u32) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the bytes of memory of each device, a multiple of 4096. Only touched pages take memory.
    #[must_use]
    pub fn with_memory_bytes(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Sets the limit of page-locked memory, in bytes.
    #[must_use]
    pub fn with_host_memory_bytes(mut self, bytes: u64) -> Self {
        self.host_memory_bytes = bytes;
        self
    }

    /// Sets an extra time that every operation of a stream takes on the device, before its effect. The record of an event is an
    /// operation, and so is a wait for one: a copy and an event behind it take the time at least twice.
    #[must_use]
    pub fn with_latency(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    /// Sets the time that creating a BLAS or Lt handle of `device` takes its caller.
    #[must_use]
    pub fn with_create_handle_latency(mut self, device: u32, latency: Duration) -> Self {
        self.create_handle_latency.insert(device, latency);
        self
    }

    /// Sets the time that the first creation of a handle takes on each device. Every creation that begins before it has ended takes
    /// that time as well, one after another, as in a driver that initializes itself.
    #[must_use]
    pub fn with_first_handle_latency(mut self, latency: Duration) -> Self {
        self.first_handle_latency = latency;
        self
    }

    /// Sets a pause of the calling thread between the two operations of a product. Callers that do not take turns then
    /// interleave for certain.
    #[must_use]
    pub fn with_gemm_gap(mut self, gap: Duration) -> Self {
        self.gemm_gap = gap;
        self
    }

    /// Changes the capabilities. A transport that the mock does not have makes [`MockGpu::open`](crate::MockGpu::open)
    /// fail.
    #[must_use]
    pub fn with_capabilities(mut self, change: impl FnOnce(&mut Capabilities)) -> Self {
        change(&mut self.capabilities);
        self
    }

    /// Makes the `nth` call of an operation fail, counted from 1. `operation` is an [`Operation`] or its name. An
    /// unknown name makes [`MockGpu::open`](crate::MockGpu::open) fail.
    ///
    /// On `OutOfMemory`, a `Runtime` frees its caches and tries once more, so one such failure of an allocation never
    /// surfaces. [`MockOptions::with_faults`] makes the second attempt fail too.
    #[must_use]
    pub fn with_fault(self, operation: impl AsRef<str>, nth: u64, kind: ErrorKind) -> Self {
        self.with_faults(operation, nth..=nth, kind)
    }

    /// Makes every call of an operation in a range fail: `3..` for the third call and all after it, `3..6` for three
    /// calls. A range without calls makes [`MockGpu::open`](crate::MockGpu::open) fail. If several faults match a call,
    /// the one set first applies.
    ///
    /// ```
    /// use highwater_hal::{AllocateOptions, Backend, ErrorKind};
    /// use highwater_mock::{MockGpu, MockOptions, Operation};
    ///
    /// // The device has memory for one block.
    /// let options = MockOptions::new().with_faults(Operation::Allocate, 2.., ErrorKind::OutOfMemory);
    /// let gpu = MockGpu::open(options)?;
    /// gpu.allocate(0, &AllocateOptions::new(4096))?;
    /// let error = gpu.allocate(0, &AllocateOptions::new(4096)).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    /// assert_eq!(gpu.calls(Operation::Allocate), 2);
    /// # Ok::<(), highwater_hal::Error>(())
    /// ```
    #[must_use]
    pub fn with_faults(mut self, operation: impl AsRef<str>, calls: impl RangeBounds<u64>, kind: ErrorKind) -> Self {
        self.faults.push((operation.as_ref().to_owned(), call_numbers(&calls), kind));
        self
    }

    /// Makes calls of an operation fail by chance, `per_million` of a million on average. The seed decides which ones;
    /// see [`MockGpu::fail_by_chance`](crate::MockGpu::fail_by_chance). An unknown name, or more than a million, makes
    /// [`MockGpu::open`](crate::MockGpu::open) fail.
    #[must_use]
    pub fn with_chance(mut self, operation: impl AsRef<str>, per_million: u32, kind: ErrorKind) -> Self {
        self.chances.push((operation.as_ref().to_owned(), per_million, kind));
        self
    }

    /// Sets the seed of all chances; 0 by default.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Keeps freed device memory from being handed out again while it and the memory freed after it come to at most
    /// `bytes` bytes. Work that uses it too late then spoils no other memory. It counts as free, and is handed out if
    /// nothing else is left.
    #[must_use]
    pub fn with_quarantine_bytes(mut self, bytes: u64) -> Self {
        self.quarantine.bytes = Some(bytes);
        self
    }

    /// Keeps freed device memory back until `frees` further blocks were freed. If both limits are set, the first one
    /// reached applies.
    #[must_use]
    pub fn with_quarantine_frees(mut self, frees: usize) -> Self {
        self.quarantine.frees = Some(frees);
        self
    }

    /// Turns test mode on. Device memory and page-locked memory are filled with [`POISON`](crate::POISON) when they are
    /// freed. The mock finds memory that is freed, closed, unmapped or handed out while a stream still has work on it; see
    /// [`MockGpu::violations`](crate::MockGpu::violations). Some freed page-locked blocks stay mapped for a while.
    /// Costs time and memory.
    #[must_use]
    pub fn with_checks(mut self) -> Self {
        self.checks = true;
        self
    }

    /// Turns the race finder on. It finds operations that touch the same memory, of which one writes, and that nothing
    /// orders; see [`MockGpu::races`](crate::MockGpu::races) and [`races`](crate::races). Costs time, above all for a
    /// backtrace of each call.
    #[must_use]
    pub fn with_race_detector(mut self) -> Self {
        self.race_detector = true;
        self
    }

    /// Turns on the race finder, which then tells the threads of the host apart. A wait counts only for the thread that
    /// waited.
    ///
    /// The finder sees what core's locks and the calls of the backend order. It does not see the program's own locks,
    /// channels and joins, so the program declares each of these with [`MockGpu::hand_over`](crate::MockGpu::hand_over). The
    /// finder blames a correct program that does not. [`races`](crate::races) has the rules.
    #[must_use]
    pub fn with_thread_races(mut self) -> Self {
        self.thread_races = true;
        self.with_race_detector()
    }

    /// Executes the streams' operations in an order that follows from `seed` and the calls, instead of on worker
    /// threads. A test that fails with a seed fails with it again, and each seed tries another order.
    ///
    /// Operations happen within calls. A wait executes what it needs; any other call executes some operations, or none.
    /// Latencies of operations are left out, and events record the clock.
    ///
    /// The order depends only on the seed and on the calls, under three conditions: one host thread calls at a time,
    /// nothing waits for an event of another process, and
    /// [`MockGpu::unscheduled_operations`](crate::MockGpu::unscheduled_operations) is 0.
    #[must_use]
    pub fn with_schedule(mut self, seed: u64) -> Self {
        self.schedule = Some(seed);
        self
    }

    /// Holds every stream. Its work is executed when a call waits for it, or at
    /// [`MockGpu::release_stream`](crate::MockGpu::release_stream), and not before. Code that polls instead of waiting
    /// waits forever, so only code sets this option. Latencies of operations are left out.
    ///
    /// A wait executes what comes before its goal and nothing else, also on other streams. An event that no
    /// held work comes before is reached at once. A stream that is destroyed
    /// stays held. [`MockGpu::open`](crate::MockGpu::open) fails if [`MockOptions::with_schedule`] is set too.
    #[must_use]
    pub fn with_held_streams(mut self) -> Self {
        self.held = true;
        self
    }

    /// Reads `HIGHWATER_MOCK`. If it is unset or empty, returns the default. See [`MockOptions::parse`].
    ///
    /// # Errors
    /// As for [`MockOptions::parse`], and for options that [`MockGpu::open`](crate::MockGpu::open) refuses. The message
    /// names the variable.
    pub fn from_environment() -> Result<Self> {
        match std::env::var(ENVIRONMENT_VARIABLE) {
            Ok(text) => Self::from_variable(&text),
            Err(std::env::VarError::NotPresent) => Ok(Self::new()),
            Err(std::env::VarError::NotUnicode(_)) => {
                Err(invalid(format!("{ENVIRONMENT_VARIABLE} is not UTF-8"), "write it in ASCII"))
            }
        }
    }

    /// Parses and checks. An error of either names the variable, for the person who set it.
    fn from_variable(text: &str) -> Result<Self> {
        // No code holds the mock to ask it for races.
        let checked = |options: Self| options.check().map(|_| Self { prints_races: true, ..options });
        Self::parse(text).and_then(checked).map_err(|error| {
            let message = format!("in {ENVIRONMENT_VARIABLE}, {}", error.message());
            Error::new(error.kind(), error.operation(), message).with_hint(error.hint())
        })
    }

    /// Reads options from `key=value` pairs separated by commas:
    ///
    /// | key | value |
    /// |---|---|
    /// | `devices` | a number |
    /// | `memory`, `host-memory`, `blas-workspace-bytes`, `lt-workspace-bytes`, `workspace-alignment`, `register-piece-bytes`, `mapped-memory-granularity` | bytes, or a number with `KiB`, `MiB`, `GiB` or `TiB` |
    /// | `ipc-transports` | `descriptor` or `none` |
    /// | `latency`, `gemm-gap`, `first-handle-latency` | a whole number with `ns`, `us`, `ms` or `s`, at most one hour (`3600s`) |
    /// | `create-handle-latency` | `DEVICE:TIME` |
    /// | `fail` | `OPERATION:CALLS` or `OPERATION:CALLS:KIND`: the number of a call or a range as in Rust (`3`, `3..`, `3..6`, `3..=5`), and the kind in words with dashes (`out-of-memory`) |
    /// | `chance` | `OPERATION:PER-MILLION` or `OPERATION:PER-MILLION:KIND` |
    /// | `seed`, `quarantine-frees` | a number |
    /// | `quarantine-bytes` | bytes |
    /// | `checks`, `race-detector`, `thread-races` | `on` or `off`; `thread-races=on` turns the race finder on too |
    /// | `schedule` | a number, the seed |
    /// | an ability or a fact by the name of its field, `lt` for short | `on` or `off` |
    ///
    /// Keys and kinds accept `_` for `-`. `fail`, `chance` and `create-handle-latency` may appear several times.
    ///
    /// ```
    /// use highwater_mock::MockOptions;
    /// MockOptions::parse("devices=2,memory=64MiB,latency=1ms,create-handle-latency=0:200ms,fail=allocate:3,lt=off")?;
    /// let error = MockOptions::parse("memory=lots").unwrap_err();
    /// assert!(error.to_string().contains("`memory`") && error.to_string().contains("`lots`"));
    /// # Ok::<(), highwater_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` with the key, the value, and the expected form.
    pub fn parse(text: &str) -> Result<Self> {
        let mut options = Self::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| invalid(format!("`{}` has no `=`", display_foreign(pair)), "write key=value"))?;
            options.set(key.trim(), value.trim())?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let bad = |expected: &str| {
            invalid(
                format!("the value of `{}` is `{}`", display_foreign(key), display_foreign(value)),
                &format!("expected {expected}"),
            )
        };
        let bytes = || parse_bytes(value).ok_or_else(|| bad("bytes, such as 4096, 64KiB, 64MiB or 4GiB"));
        let size = || bytes().map(|bytes| bytes as usize);
        let time = |value| {
            let duration = parse_duration(value).filter(|&duration| duration <= LONGEST_TIME);
            duration.ok_or_else(|| bad("a time of at most 3600s, such as 100us, 1ms or 2s"))
        };
        match key.replace('_', "-").as_str() {
            "devices" => self.devices = value.parse().map_err(|_| bad("a number of devices"))?,
            "memory" => self.memory_bytes = bytes()?,
            "host-memory" => self.host_memory_bytes = bytes()?,
            "blas-workspace-bytes" => self.capabilities.blas_workspace_bytes = size()?,
            "lt-workspace-bytes" => self.capabilities.lt_workspace_bytes = size()?,
            "workspace-alignment" => self.capabilities.workspace_alignment = size()?,
            "register-piece-bytes" => self.capabilities.register_piece_bytes = size()?,
            "mapped-memory-granularity" => self.capabilities.mapped_memory_granularity = size()?,
            "ipc-transports" => {
                self.capabilities.ipc_transports = match value {
                    "descriptor" => TRANSPORTS,
                    "none" => Transports::NONE,
                    _ => return Err(bad("`descriptor` or `none`")),
                }
            }
            "latency" => self.latency = time(value)?,
            "gemm-gap" => self.gemm_gap = time(value)?,
            "first-handle-latency" => self.first_handle_latency = time(value)?,
            "create-handle-latency" => {
                let expected = || bad("DEVICE:TIME, such as 0:200ms");
                let (device, latency) = value.split_once(':').ok_or_else(expected)?;
                let device = device.parse().map_err(|_| expected())?;
                self.create_handle_latency.insert(device, time(latency)?);
            }
            "fail" => {
                let expected = "OPERATION:CALLS or OPERATION:CALLS:KIND, such as copy:3, allocate:3.. or copy:1:device-lost; \
                     calls count from 1";
                let (operation, numbers, kind) = parse_fault(value, parse_calls, expected, &bad)?;
                self.faults.push((operation.name().to_owned(), numbers, kind));
            }
            "chance" => {
                let expected = "OPERATION:PER-MILLION or OPERATION:PER-MILLION:KIND, such as allocate:100";
                let (operation, per_million, kind) =
                    parse_fault(value, |number| number.parse::<u32>().ok(), expected, &bad)?;
                self.chances.push((operation.name().to_owned(), per_million, kind));
            }
            "checks" => self.checks = on_or_off(value).ok_or_else(|| bad("`on` or `off`"))?,
            "race-detector" => self.race_detector = on_or_off(value).ok_or_else(|| bad("`on` or `off`"))?,
            "thread-races" => {
                self.thread_races = on_or_off(value).ok_or_else(|| bad("`on` or `off`"))?;
                self.race_detector |= self.thread_races;
            }
            "schedule" => self.schedule = Some(value.parse().map_err(|_| bad("a number, the seed"))?),
            "seed" => self.seed = value.parse().map_err(|_| bad("a number"))?,
            "quarantine-bytes" => self.quarantine.bytes = Some(bytes()?),
            "quarantine-frees" => self.quarantine.frees = Some(value.parse().map_err(|_| bad("a number of blocks"))?),
            other => {
                let field = if other == "lt" { "lt_plans".to_owned() } else { other.replace('-', "_") };
                if !switches().any(|name| name == field) {
                    let (key, value) = (display_foreign(key), display_foreign(value));
                    return Err(invalid(
                        format!("`{key}` (with the value `{value}`) is not an option of the mock"),
                        &format!("expected one of {}, {}", KEYS.join(", "), switches().collect::<Vec<_>>().join(", ")),
                    ));
                }
                switch(&mut self.capabilities, &field, on_or_off(value).ok_or_else(|| bad("`on` or `off`"))?);
            }
        }
        Ok(())
    }

    /// Checks what the builder methods accepted unchecked. Returns the faults with their operations.
    pub(crate) fn check(&self) -> Result<Vec<(Operation, RangeInclusive<u64>, ErrorKind)>> {
        if !(1..=MAX_DEVICES).contains(&self.devices) {
            return Err(invalid(format!("{} devices were asked for", self.devices), "expected 1 to 64"));
        }
        if self.memory_bytes == 0 || !self.memory_bytes.is_multiple_of(PAGE) || self.memory_bytes > MAX_MEMORY_BYTES {
            return Err(invalid(
                format!("{} bytes of memory per device were asked for", self.memory_bytes),
                "expected a multiple of 4096, up to 4 TiB",
            ));
        }
        if self.held && self.schedule.is_some() {
            return Err(invalid("a schedule and held streams were asked for".to_owned(), "ask for one of them"));
        }
        if let Some(device) = self.create_handle_latency.keys().find(|&&device| device >= self.devices) {
            return Err(invalid(
                format!("a latency is set for handles of device {device}"),
                &format!("expected a device below {}", self.devices),
            ));
        }
        if !self.capabilities.workspace_alignment.is_power_of_two() {
            return Err(invalid(
                format!("the workspace alignment is {}", self.capabilities.workspace_alignment),
                "expected a power of two",
            ));
        }
        let capabilities = self.capabilities;
        let granularity = capabilities.mapped_memory_granularity;
        if capabilities.mapped_memory && (granularity == 0 || !granularity.is_multiple_of(page_bytes() as usize)) {
            return Err(invalid(
                format!("the granularity of mapped memory is {granularity} bytes"),
                &format!("expected a multiple of {}, the size of a page", page_bytes()),
            ));
        }
        if ![Transports::NONE, TRANSPORTS].contains(&capabilities.ipc_transports) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "open",
                format!("the mock cannot share memory by every transport of {:?}", capabilities.ipc_transports),
            )
            .with_hint("use `Transport::Descriptor`, or no transport"));
        }
        self.check_chances()?;
        self.faults
            .iter()
            .map(|(name, numbers, kind)| match name.parse() {
                Ok(operation) if *numbers.start() > 0 && !numbers.is_empty() => Ok((operation, numbers.clone(), *kind)),
                Ok(_) if numbers.is_empty() => Err(invalid(
                    format!("the fault's range has no call of `{name}`"),
                    "pass a range that contains calls, such as 3..",
                )),
                Ok(_) => Err(invalid(format!("the fault is for call 0 of `{name}`"), "calls count from 1")),
                Err(error) => Err(error),
            })
            .collect()
    }
}

impl MockOptions {
    /// Returns the faults by chance, with their operations.
    pub(crate) fn check_chances(&self) -> Result<Vec<(Operation, u32, ErrorKind)>> {
        self.chances
            .iter()
            .map(|(name, per_million, kind)| match name.parse() {
                Ok(operation) if *per_million <= MILLION => Ok((operation, *per_million, *kind)),
                Ok(_) => Err(invalid(
                    format!("{per_million} in a million calls of `{name}` should fail"),
                    "the largest chance is 1000000",
                )),
                Err(error) => Err(error),
            })
            .collect()
    }
}

/// Returns the numbers of calls in a range, from the first call on if it has no start. Empty if the range is empty.
fn call_numbers(calls: &impl RangeBounds<u64>) -> RangeInclusive<u64> {
    #[expect(clippy::reversed_empty_ranges, reason = "no call is in it")]
    const NONE: RangeInclusive<u64> = 2..=1;
    let first = match calls.start_bound() {
        Bound::Included(first) => Some(*first),
        Bound::Excluded(before) => before.checked_add(1),
        Bound::Unbounded => Some(1),
    };
    let last = match calls.end_bound() {
        Bound::Included(last) => Some(*last),
        Bound::Excluded(end) => end.checked_sub(1),
        Bound::Unbounded => Some(u64::MAX),
    };
    first.zip(last).map_or(NONE, |(first, last)| first..=last)
}

/// Reads the number of a call, or a range of them in Rust's syntax.
fn parse_calls(text: &str) -> Option<RangeInclusive<u64>> {
    let number = |text: &str| text.parse::<u64>().ok();
    let numbers = match text.split_once("..") {
        None => number(text).map(|nth| nth..=nth)?,
        Some((first, "")) => call_numbers(&(number(first)?..)),
        Some((first, last)) => match last.strip_prefix('=') {
            Some(last) => number(first)?..=number(last)?,
            None => call_numbers(&(number(first)?..number(last)?)),
        },
    };
    Some(numbers).filter(|numbers| *numbers.start() > 0 && !numbers.is_empty())
}

/// Reads `OPERATION:WHICH` or `OPERATION:WHICH:KIND`. `bad` makes the error that states the expected form.
fn parse_fault<W>(
    value: &str,
    parse: impl Fn(&str) -> Option<W>,
    expected: &str,
    bad: &dyn Fn(&str) -> Error,
) -> Result<(Operation, W, ErrorKind)> {
    let mut parts = value.split(':');
    let (name, which) = parts.next().zip(parts.next()).ok_or_else(|| bad(expected))?;
    let operation: Operation = name.parse()?;
    let which = parse(which).ok_or_else(|| bad(expected))?;
    let kind = match parts.next() {
        None => operation.usual_failure(),
        Some(words) => parse_kind(words).ok_or_else(|| {
            let known: Vec<_> = ErrorKind::ALL.iter().map(|kind| dashed(*kind)).collect();
            let error = bad(&format!("one of the kinds {}", known.join(", ")));
            let hint = format!("{}{}", did_you_mean(&words.replace('_', "-"), &known), error.hint());
            error.with_hint(hint)
        })?,
    };
    if parts.next().is_some() {
        return Err(bad(expected));
    }
    Ok((operation, which, kind))
}

fn invalid(message: String, hint: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, "mock_options", message).with_hint(hint)
}

fn default_capabilities() -> Capabilities {
    let mut capabilities = Capabilities::none();
    Abilities::put(u64::MAX, &mut capabilities);
    Facts::put(u64::MAX, &mut capabilities);
    capabilities.handle_per_stream = false;
    capabilities.ipc_transports = TRANSPORTS;
    capabilities.workspace_alignment = 256;
    capabilities.blas_workspace_bytes = 32 << 20;
    capabilities.lt_workspace_bytes = 1 << 20;
    capabilities.register_piece_bytes = REGISTER_PIECE_BYTES;
    capabilities.mapped_memory_granularity = MAPPED_MEMORY_GRANULARITY;
    capabilities
}

/// Returns the names of all abilities and facts.
fn switches() -> impl Iterator<Item = &'static str> {
    Abilities::NAMES.iter().chain(Facts::NAMES).map(|constant| constant.rust)
}

/// Sets the ability or the fact of this name.
fn switch(capabilities: &mut Capabilities, name: &str, on: bool) {
    let bit = |names: &[Constant]| names.iter().find(|constant| constant.rust == name).map_or(0, |found| found.value);
    let with = |set: u64, bit: u64| if on { set | bit } else { set & !bit };
    Abilities::put(with(Abilities::of(capabilities), bit(Abilities::NAMES)), capabilities);
    Facts::put(with(Facts::of(capabilities), bit(Facts::NAMES)), capabilities);
}

/// The transports of the mock.
const TRANSPORTS: Transports = Transports::NONE.with(Transport::Descriptor);

const KEYS: &[&str] = &[
    "devices",
    "memory",
    "host-memory",
    "blas-workspace-bytes",
    "lt-workspace-bytes",
    "workspace-alignment",
    "register-piece-bytes",
    "mapped-memory-granularity",
    "ipc-transports",
    "latency",
    "gemm-gap",
    "create-handle-latency",
    "first-handle-latency",
    "fail",
    "chance",
    "seed",
    "quarantine-bytes",
    "quarantine-frees",
    "checks",
    "race-detector",
    "thread-races",
    "schedule",
    "lt",
];

fn dashed(kind: ErrorKind) -> String {
    kind.as_str().replace(' ', "-")
}

fn parse_kind(words: &str) -> Option<ErrorKind> {
    let words = words.replace('_', "-");
    ErrorKind::ALL.iter().copied().find(|&kind| dashed(kind) == words)
}

fn on_or_off(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    Some(Duration::from_nanos(digits.parse::<u64>().ok()?.checked_mul(unit)?))
}

fn physical_memory_bytes() -> u64 {
    // SAFETY: `sysconf` reads a setting and has no requirements.
    let (pages, page) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    match (u64::try_from(pages), u64::try_from(page)) {
        (Ok(pages), Ok(page)) => pages.saturating_mul(page),
        // A system that reports no size limits by refusing.
        _ => u64::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read() {
        let options = MockOptions::parse(
            "devices=2, memory=64MiB,host_memory=1GiB,latency=1ms,gemm-gap=20us,create-handle-latency=0:200ms,\
             fail=allocate:3,fail=copy:1:device-lost,lt=off,peer-copy=off,write_combined=off,handle-per-stream=on,\
             blas-workspace-bytes=64KiB,lt-workspace-bytes=4096,workspace-alignment=512,ipc-transports=none,\
             register-piece-bytes=2MiB,first-handle-latency=3ms,\
             chance=fill:1000,chance=open_memory:5:permission-denied,seed=42,quarantine-bytes=1MiB,\
             quarantine_frees=10,checks=on,race-detector=on,schedule=99,",
        )
        .unwrap();
        assert_eq!((options.devices, options.memory_bytes, options.host_memory_bytes), (2, 64 << 20, 1 << 30));
        assert_eq!((options.latency, options.gemm_gap), (Duration::from_millis(1), Duration::from_micros(20)));
        assert_eq!(options.create_handle_latency[&0], Duration::from_millis(200));
        assert_eq!(options.first_handle_latency, Duration::from_millis(3));
        let capabilities = options.capabilities;
        assert!(!capabilities.lt_plans && !capabilities.peer_copy && !capabilities.write_combined);
        assert!(capabilities.handle_per_stream && capabilities.gemm_f32);
        assert_eq!((capabilities.blas_workspace_bytes, capabilities.lt_workspace_bytes), (65536, 4096));
        assert_eq!((capabilities.workspace_alignment, capabilities.register_piece_bytes), (512, 2 << 20));
        assert!(capabilities.ipc_transports.is_empty());
        assert!(options.checks && options.race_detector && options.schedule == Some(99));
        assert!(!options.thread_races && !MockOptions::parse("race_detector=off").unwrap().race_detector);
        let apart = MockOptions::parse("thread_races=on").unwrap();
        assert!(apart.thread_races && apart.race_detector);
        assert!(!options.prints_races && MockOptions::from_variable("race_detector=on").unwrap().prints_races);
        assert_eq!((options.seed, options.quarantine), (42, Quarantine { bytes: Some(1 << 20), frees: Some(10) }));
        assert_eq!(
            options.check_chances().unwrap(),
            [(Operation::Fill, 1000, ErrorKind::Vendor), (Operation::OpenMemory, 5, ErrorKind::PermissionDenied)]
        );
        assert_eq!(
            options.check().unwrap(),
            [(Operation::Allocate, 3..=3, ErrorKind::OutOfMemory), (Operation::Copy, 1..=1, ErrorKind::DeviceLost)]
        );
    }

    #[test]
    fn faults_of_several_calls_are_ranges_as_in_rust() {
        let fail = |calls: &str| MockOptions::parse(&format!("fail=copy:{calls}")).unwrap().check().unwrap();
        let expect = |options: MockOptions| options.check().unwrap();
        let kind = ErrorKind::Vendor;
        assert_eq!(fail("3"), expect(MockOptions::new().with_fault("copy", 3, kind)));
        assert_eq!(fail("3.."), expect(MockOptions::new().with_faults("copy", 3.., kind)));
        assert_eq!(fail("3..6"), expect(MockOptions::new().with_faults("copy", 3..6, kind)));
        assert_eq!(fail("3..=5"), expect(MockOptions::new().with_faults(Operation::Copy, 3..=5, kind)));
        assert_eq!(fail("3..6"), [(Operation::Copy, 3..=5, kind)]);
        assert_eq!(expect(MockOptions::new().with_faults("copy", .., kind)), [(Operation::Copy, 1..=u64::MAX, kind)]);
        assert_eq!(
            MockOptions::parse("fail=copy:1:out_of_memory").unwrap().check().unwrap()[0].2,
            ErrorKind::OutOfMemory
        );
        let several = MockOptions::parse("fail=allocate:2..:out-of-memory,fail=copy:1..=2:device-lost").unwrap();
        assert_eq!(several.check().unwrap().len(), 2);
        for bad in ["0..", "0", "..3", "3..3", "6..3", "5..=4", "3...", "3..x", "..", "3..=", "-1.."] {
            let error = MockOptions::parse(&format!("fail=copy:{bad}")).unwrap_err();
            assert!(error.message().contains("`fail`") && error.hint().contains("allocate:3.."), "{bad}: {error}");
        }
        let open = |options: MockOptions| options.check().unwrap_err();
        assert!(open(MockOptions::new().with_faults("copy", 0.., kind)).message().contains("call 0 of `copy`"));
        assert!(open(MockOptions::new().with_faults("copy", 5..5, kind)).message().contains("no call of `copy`"));
        assert!(open(MockOptions::new().with_faults("copy", ..0, kind)).message().contains("no call of `copy`"));
        assert!(open(MockOptions::new().with_faults("cpy", 1.., kind)).message().contains("`cpy`"));
    }

    #[test]
    fn nothing_is_the_default() {
        assert_eq!(MockOptions::parse("").unwrap().capabilities, MockOptions::new().capabilities);
        assert!(MockOptions::new().check().unwrap().is_empty());
    }

    #[test]
    fn errors_name_key_value_and_what_is_expected() {
        for (text, parts) in [
            ("devices=two", ["`devices`", "`two`", "number"]),
            ("memory=64MB", ["`memory`", "`64MB`", "64MiB"]),
            ("latency=5", ["`latency`", "`5`", "1ms"]),
            ("create-handle-latency=200ms", ["`create-handle-latency`", "`200ms`", "DEVICE:TIME"]),
            ("fail=allocate", ["`fail`", "`allocate`", "OPERATION:CALLS"]),
            ("fail=allocate:0", ["`fail`", "`allocate:0`", "OPERATION:CALLS"]),
            ("fail=allocate:1:vendor-error:x", ["`fail`", "vendor-error:x", "OPERATION:CALLS"]),
            ("fail=allocate:1:sad", ["`fail`", "sad", "out-of-memory"]),
            ("fail=alocate:1", ["`alocate`", "no operation", "did you mean `allocate`? "]),
            (
                "fail=copy:1:devicelost",
                ["`fail`", "devicelost", "did you mean `device-lost`? expected one of the kinds"],
            ),
            ("fail=copy:1:out_of_memori", ["`fail`", "out_of_memori", "did you mean `out-of-memory`? "]),
            ("ipc-transports=fabric", ["`ipc-transports`", "`fabric`", "`descriptor` or `none`"]),
            ("chance=fill:often", ["`chance`", "`fill:often`", "OPERATION:PER-MILLION"]),
            ("chance=fill:4294967296", ["`chance`", "`fill:4294967296`", "OPERATION:PER-MILLION"]),
            ("seed=x", ["`seed`", "`x`", "a number"]),
            ("schedule=-1", ["`schedule`", "`-1`", "a number, the seed"]),
            ("race-detector=yes", ["`race-detector`", "`yes`", "`on` or `off`"]),
            ("lt=maybe", ["`lt`", "`maybe`", "`on` or `off`"]),
            ("colour=red", ["`colour`", "`red`", "peer_copy"]),
            ("devices", ["`devices`", "no `=`", "key=value"]),
            ("latency=99999999999999999s", ["`latency`", "99999999999999999s", "a time"]),
            ("gemm-gap=3601s", ["`gemm-gap`", "3601s", "at most 3600s"]),
            ("create-handle-latency=0:3153600000s", ["`create-handle-latency`", "3153600000s", "at most 3600s"]),
        ] {
            let error = MockOptions::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
            for part in parts {
                assert!(error.to_string().contains(part), "`{part}` is missing in `{error}`");
            }
        }
    }

    #[test]
    fn the_largest_memory_can_be_written_as_it_stands_in_the_limit() {
        let options = MockOptions::parse("memory=4TiB").unwrap();
        assert_eq!(options.memory_bytes, MAX_MEMORY_BYTES);
        assert!(options.check().is_ok());
        let error = MockOptions::parse("memory=5TiB").unwrap().check().unwrap_err();
        assert!(error.hint().contains("up to 4 TiB"), "{error}");
        assert!(MockOptions::parse("memory=16777216TiB").is_err(), "2^64 bytes");
    }

    #[test]
    fn what_is_wrong_with_the_variable_names_it_and_keeps_the_hint() {
        for text in [
            "memory=lots",
            "colour=red",
            "fail=alocate:1",
            "devices",
            "devices=0",
            "memory=100",
            "ipc-transports=fabric",
        ] {
            let plain = MockOptions::parse(text).and_then(|options| options.check()).unwrap_err();
            let error = MockOptions::from_variable(text).unwrap_err();
            assert_eq!(error.message(), format!("in HIGHWATER_MOCK, {}", plain.message()));
            assert_eq!((error.kind(), error.hint()), (plain.kind(), plain.hint()), "{text}");
            assert!(!error.hint().is_empty(), "{text}");
        }
    }

    #[test]
    fn bad_options_are_refused_when_the_mock_is_opened() {
        let kind = |options: MockOptions| options.check().unwrap_err().kind();
        assert_eq!(kind(MockOptions::new().with_devices(0)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_memory_bytes(100)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_memory_bytes(u64::MAX - 4095)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_create_handle_latency(1, Duration::ZERO)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_fault("alloc", 1, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_fault("copy", 0, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
        assert_eq!(kind(MockOptions::new().with_chance("coppy", 1, ErrorKind::Vendor)), ErrorKind::InvalidArgument);
        assert_eq!(
            kind(MockOptions::new().with_chance("copy", 1_000_001, ErrorKind::Vendor)),
            ErrorKind::InvalidArgument
        );
        assert_eq!(
            kind(MockOptions::new().with_capabilities(|c| c.workspace_alignment = 3)),
            ErrorKind::InvalidArgument
        );
        let transports = highwater_hal::Transports::NONE.with(highwater_hal::Transport::Legacy);
        assert_eq!(
            kind(MockOptions::new().with_capabilities(|c| c.ipc_transports = transports)),
            ErrorKind::Unsupported
        );
    }
}
