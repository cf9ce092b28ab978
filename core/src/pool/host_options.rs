//! [`HostMemoryOptions`]: the options of page-locked host memory, and their form in the variable `HIGHWATER_HOST_MEMORY`.

use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::key_values::{self, Key};
use highwater_hal::{Error, ErrorKind, Result};

/// The variable that sets options that the program does not set.
const VARIABLE: &str = "HIGHWATER_HOST_MEMORY";
const OPERATION: &str = "host memory options";

/// The keys of the variable, with the form of their values and a function that sets one.
const KEYS: [Key<HostMemoryOptions>; 7] = [
    ("cap", SIZE, |options, value| Some(options.with_cap_bytes(bytes(value)?))),
    ("idle-cap", SIZE, |options, value| Some(options.with_idle_cap_bytes(bytes(value)?))),
    ("idle-seconds", "a whole number of seconds", |options, value| {
        Some(options.with_idle_time(Duration::from_secs(digits(value)?)))
    }),
    ("background", "`on` or `off`", |options, value| Some(options.with_background(named(value, &SWITCH)?))),
    ("huge-pages", "`transparent`, `reserved` or `off`", |options, value| {
        let names = [HugePages::Transparent, HugePages::Reserved, HugePages::Off].map(|pages| (pages.as_str(), pages));
        Some(options.with_huge_pages(named(value, &names)?))
    }),
    ("poison", "`on` or `off`", |options, value| Some(options.with_poison(named(value, &SWITCH)?))),
    ("record", "the path of a file, without a comma", |options, value| {
        // The options are `Copy`. The variable is read once for each runtime, so little is leaked.
        let path = || Path::new(Box::leak(Box::<str>::from(value)));
        Some(options.with_record((!value.is_empty()).then(path)?))
    }),
];
const SWITCH: [(&str, bool); 2] = [("on", true), ("off", false)];
const SIZE: &str = "a whole number of bytes, KiB, MiB, GiB or TiB, such as `512MiB`";
const UNITS: [(&str, u32); 4] = [("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)];

/// The huge pages that the pool may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum HugePages {
    /// Transparent huge pages, where the kernel has them.
    #[default]
    Transparent,
    /// Huge pages of 2 MiB that the user reserved (`vm.nr_hugepages`), as far as some are free; otherwise transparent ones.
    /// Reserved pages do not reduce the memory that the machine and the control group have left.
    Reserved,
    /// Small pages only.
    Off,
}

impl HugePages {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Transparent => "transparent",
            Self::Reserved => "reserved",
            Self::Off => "off",
        }
    }
}

/// The options of the page-locked host memory of a [`Runtime`](crate::Runtime).
///
/// [`RuntimeOptions::with_host_memory`](crate::RuntimeOptions::with_host_memory) passes the options to a runtime. The environment
/// variable `HIGHWATER_HOST_MEMORY` sets those that the program does not set. It has `key=value` pairs, separated by commas:
/// `cap=8GiB,idle-cap=512MiB,idle-seconds=60,huge-pages=transparent`. The key of each field is in parentheses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HostMemoryOptions {
    /// Bytes of page-locked memory that the runtime may hold, in use or idle; unlimited by default (`cap`).
    pub cap_bytes: Option<u64>,
    /// Bytes of page-locked memory that may be cached while no buffer owns them; unlimited by default (`idle-cap`).
    /// [`RuntimeOptions::with_host_cache_bytes`](crate::RuntimeOptions::with_host_cache_bytes) sets the same option.
    pub idle_cap_bytes: Option<u64>,
    /// The time after which idle memory is released; never by default (`idle-seconds`).
    pub idle_time: Option<Duration>,
    /// Whether a thread of the runtime releases memory after the idle time; off by default (`background`).
    pub background: Option<bool>,
    /// The huge pages that may be used (`huge-pages`).
    pub huge_pages: Option<HugePages>,
    /// Enables the check of memory for writes before it is reused; off by default (`poison`).
    pub poison: Option<bool>,
    /// The file to which a trace of all requests is written; none by default (`record`).
    pub record: Option<&'static Path>,
}

impl HostMemoryOptions {
    /// Returns the defaults.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            cap_bytes: None,
            idle_cap_bytes: None,
            idle_time: None,
            background: None,
            huge_pages: None,
            poison: None,
            record: None,
        }
    }

    /// Returns the options with a cap on the page-locked memory that the runtime holds. A request that does not fit below the
    /// cap, even after idle memory was released, returns `OutOfMemory`.
    #[must_use]
    pub const fn with_cap_bytes(mut self, cap: u64) -> Self {
        self.cap_bytes = Some(cap);
        self
    }

    /// Returns the options with a cap on idle page-locked memory: free pages, blocks whose streams are not done, and blocks that
    /// threads keep. Memory above the cap is released, in whole pieces of at least 2 MiB, once no stream uses it. Free pages of a
    /// piece that has live buffers may stay above the cap. The call that triggers the release pays for it: a drop or a request of
    /// a buffer, or a wait for a stream. The cap never causes a request to fail.
    #[must_use]
    pub const fn with_idle_cap_bytes(mut self, cap: u64) -> Self {
        self.idle_cap_bytes = Some(cap);
        self
    }

    /// Returns the options with a time after which idle memory is released. A later request or a later wait for a stream does it.
    /// A program that makes no more calls keeps its idle memory, unless it has a [background](Self::with_background) thread.
    #[must_use]
    pub const fn with_idle_time(mut self, time: Duration) -> Self {
        self.idle_time = Some(time);
        self
    }

    /// Returns the options with or without a thread that releases memory after the idle time. Without an
    /// [idle time](Self::with_idle_time), the runtime is not created (`InvalidArgument`). The thread releases memory at the latest
    /// after three times the idle time. The runtime starts the thread, and its last user ends it. A forked child has no such
    /// thread.
    ///
    /// The thread may call the backend at any time. The release of a piece may delay GPU calls of other threads by a few
    /// milliseconds.
    #[must_use]
    pub const fn with_background(mut self, is_on: bool) -> Self {
        self.background = Some(is_on);
        self
    }

    /// Returns the options with another choice of huge pages.
    #[must_use]
    pub const fn with_huge_pages(mut self, pages: HugePages) -> Self {
        self.huge_pages = Some(pages);
        self
    }

    /// Returns the options with a test mode on or off. In the mode, the pool fills memory with a pattern once its last use is
    /// complete, and checks the pattern when it reuses the memory. A request for memory that was written after its buffer was
    /// dropped, or that a stream still uses, returns `InvalidState` with the address and the offset. The memory is then not
    /// used before the runtime ends. Every request and every drop touches all bytes of the buffer.
    ///
    /// Only a reuse is checked. The mode does not report a write to memory that no later request gets, or that the pool releases
    /// first. The end of the runtime checks nothing.
    #[must_use]
    pub const fn with_poison(mut self, is_on: bool) -> Self {
        self.poison = Some(is_on);
        self
    }

    /// Returns the options with a file to which the runtime writes a trace: each request, each use by a stream and each end of
    /// a buffer, with its time in nanoseconds and the number of its thread. `highwater bench host --replay` reads it. The file
    /// is created anew. Runtimes of one process that name the same file share it, also one after the other. Other processes must
    /// not use it. Lines are kept in memory and written in groups, the last ones when the runtime ends. If the file cannot be
    /// created, neither is the runtime (`InvalidArgument`). If a write fails later, the trace ends and a warning is logged.
    ///
    /// Every request and every drop takes a lock, so it is slower than without a trace.
    #[must_use]
    pub const fn with_record(mut self, file: &'static Path) -> Self {
        self.record = Some(file);
        self
    }

    /// Returns these options, and those of `others` that are not set here.
    #[must_use]
    pub(crate) fn or(self, others: Self) -> Self {
        Self {
            cap_bytes: self.cap_bytes.or(others.cap_bytes),
            idle_cap_bytes: self.idle_cap_bytes.or(others.idle_cap_bytes),
            idle_time: self.idle_time.or(others.idle_time),
            background: self.background.or(others.background),
            huge_pages: self.huge_pages.or(others.huge_pages),
            poison: self.poison.or(others.poison),
            record: self.record.or(others.record),
        }
    }

    /// Returns the idle time of the background thread, if there is to be one.
    ///
    /// # Errors
    /// `InvalidArgument` without an idle time.
    pub(crate) fn background_time(&self) -> Result<Option<Duration>> {
        if self.background != Some(true) {
            return Ok(None);
        }
        let invalid = || {
            Error::new(ErrorKind::InvalidArgument, OPERATION, "a background thread is requested without an idle time")
                .with_hint(format!("set `idle-seconds` in {VARIABLE}, or `HostMemoryOptions::with_idle_time`"))
        };
        self.idle_time.ok_or_else(invalid).map(Some)
    }

    /// Returns the options of the environment variable; the defaults if it is not set.
    ///
    /// # Errors
    /// `InvalidArgument` for an unknown or repeated key, or a value that is not of its form.
    pub(crate) fn from_environment() -> Result<Self> {
        env::var_os(VARIABLE).map_or_else(|| Ok(Self::new()), |text| Self::parse(&text))
    }

    fn parse(text: &OsStr) -> Result<Self> {
        key_values::parse(OPERATION, VARIABLE, text, &KEYS, Self::new())
    }
}

/// Writes the options that are set in the form of the environment variable. Parts of a second are left out.
impl fmt::Display for HostMemoryOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs = [
            ("cap", self.cap_bytes.map(size)),
            ("idle-cap", self.idle_cap_bytes.map(size)),
            ("idle-seconds", self.idle_time.map(|time| time.as_secs().to_string())),
            ("background", self.background.map(|is_on| if is_on { "on" } else { "off" }.to_owned())),
            ("huge-pages", self.huge_pages.map(|pages| pages.as_str().to_owned())),
            ("poison", self.poison.map(|is_on| if is_on { "on" } else { "off" }.to_owned())),
            ("record", self.record.map(|file| file.display().to_string())),
        ];
        let set = pairs.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value?)));
        f.write_str(&set.collect::<Vec<_>>().join(","))
    }
}

fn bytes(value: &str) -> Option<u64> {
    let unit = UNITS.iter().find_map(|(unit, shift)| Some((value.strip_suffix(unit)?, 1_u64 << shift)));
    let (number, unit) = unit.unwrap_or((value, 1));
    digits(number.trim_end())?.checked_mul(unit)
}

/// Writes bytes with the largest unit that leaves a whole number.
fn size(bytes: u64) -> String {
    let unit = UNITS.iter().rev().find(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    unit.map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

/// Returns a whole number without a sign.
fn digits(text: &str) -> Option<u64> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

fn named<T: Copy>(value: &str, names: &[(&str, T)]) -> Option<T> {
    names.iter().find(|(name, _)| *name == value).map(|(_, named)| *named)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use proptest::option::of;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    use super::*;

    fn parse(text: &str) -> Result<HostMemoryOptions> {
        HostMemoryOptions::parse(text.as_ref())
    }

    #[test]
    fn all_keys_are_read() {
        let options = HostMemoryOptions::new()
            .with_cap_bytes(8 << 30)
            .with_idle_cap_bytes(512 << 20)
            .with_idle_time(Duration::from_secs(60))
            .with_background(true)
            .with_huge_pages(HugePages::Transparent)
            .with_poison(true)
            .with_record(Path::new("/tmp/trace.jsonl"));
        let text = "cap=8GiB,idle-cap=512MiB,idle-seconds=60,background=on,huge-pages=transparent,poison=on,\
                    record=/tmp/trace.jsonl";
        assert_eq!(parse(text).unwrap(), options);
        assert_eq!(options.to_string(), text);
        assert_eq!(parse(" huge-pages = off , cap=1 ").unwrap().to_string(), "cap=1,huge-pages=off");
        for empty in ["", " "] {
            assert_eq!(parse(empty).unwrap(), HostMemoryOptions::new());
        }
    }

    #[test]
    fn sizes_are_whole_numbers_with_or_without_a_unit() {
        for (text, expected) in
            [("0", 0), ("4096", 4096), ("1KiB", 1 << 10), ("7 MiB", 7 << 20), ("3GiB", 3 << 30), ("2TiB", 2 << 40)]
        {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
        let bad = [
            "",
            "MiB",
            "1.5GiB",
            "-1",
            "+1",
            "1M",
            "1MB",
            "1mib",
            "1 2",
            "0x10",
            "18446744073709551616",
            "16777216TiB",
        ];
        for text in bad {
            assert_eq!(bytes(text), None, "{text:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_answered_with_the_known_ones() {
        for text in ["caps=1", "Cap=1", "=1", "cap=1,idle_cap=2", "cap", "cap=1,", ",", "cap=1,,idle-cap=1"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(error.message().starts_with(&format!("HIGHWATER_HOST_MEMORY={text}: `")), "{error}");
            for (key, expected, _) in KEYS {
                assert!(error.hint().contains(&format!("`{key}` ({expected})")), "{error}");
            }
        }
    }

    #[test]
    fn a_bad_value_is_answered_with_the_form_of_its_key() {
        for text in [
            "cap=",
            "cap=all",
            "idle-cap=1.5GiB",
            "idle-seconds=1.5",
            "idle-seconds=-1",
            "background=yes",
            "huge-pages=on",
            "cap=1=2",
            "poison=1",
            "record=",
        ] {
            let error = parse(text).unwrap_err();
            let (key, value) = text.split_once('=').unwrap();
            assert!(error.message().ends_with(&format!("`{value}` is not a value of `{key}`")), "{error}");
            let (_, expected, _) = KEYS.iter().find(|(known, ..)| *known == key).unwrap();
            assert_eq!(error.hint(), format!("`{key}` expects {expected}"));
        }
    }

    #[test]
    fn a_key_that_is_set_twice_and_text_that_is_not_utf8_are_errors() {
        let error = parse("cap=1,idle-cap=2,cap=1").unwrap_err();
        assert!(error.message().ends_with("`cap` is set twice"), "{error}");
        let error = HostMemoryOptions::parse(OsStr::from_bytes(b"cap=\xff")).unwrap_err();
        assert_eq!(error.message(), "HIGHWATER_HOST_MEMORY=cap=\\xff: not UTF-8");
    }

    #[test]
    fn the_program_overrides_the_variable() {
        let program = HostMemoryOptions::new().with_cap_bytes(1);
        let merged = program.or(parse("cap=2,idle-cap=3,huge-pages=off").unwrap());
        assert_eq!(merged.to_string(), "cap=1,idle-cap=3,huge-pages=off");
    }

    fn options() -> impl Strategy<Value = HostMemoryOptions> {
        let bytes =
            || of(prop_oneof![any::<u64>(), (0..1_u64 << 20, 0..44_u32).prop_map(|(number, shift)| number << shift)]);
        let pages = select(&[HugePages::Transparent, HugePages::Reserved, HugePages::Off][..]);
        (bytes(), bytes(), of(any::<u64>()), of(any::<bool>()), of(pages), of(any::<bool>())).prop_map(
            |(cap_bytes, idle_cap_bytes, seconds, background, huge_pages, poison)| HostMemoryOptions {
                cap_bytes,
                idle_cap_bytes,
                idle_time: seconds.map(Duration::from_secs),
                background,
                huge_pages,
                poison,
                record: None,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_written_is_read_again_in_any_order(options in options(), first: Index) {
            let text = options.to_string();
            prop_assert_eq!(parse(&text).unwrap(), options);
            let mut pairs: Vec<_> = text.split(',').collect();
            let first = first.index(pairs.len());
            pairs.rotate_left(first);
            prop_assert_eq!(parse(&pairs.join(" , ")).unwrap(), options);
        }

        #[test]
        fn any_text_is_read_or_refused_with_a_remedy(text in ".{0,40}|([a-z-]{0,12}[=,]?[0-9KMGTiB]{0,8},?){0,4}") {
            match parse(&text) {
                Ok(options) => prop_assert_eq!(parse(&options.to_string()).unwrap(), options),
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                    prop_assert!(!error.hint().is_empty());
                    prop_assert!(error.message().starts_with("HIGHWATER_HOST_MEMORY="));
                }
            }
        }

        #[test]
        fn a_text_with_one_damaged_pair_is_refused(
            options in options(),
            place: Index,
            damage in select(&["cap", "x=1", "huge-pages=maybe", "=", ""][..]),
        ) {
            let text = options.to_string();
            let mut pairs: Vec<_> = text.split(',').filter(|pair| !pair.is_empty()).collect();
            prop_assume!(!pairs.is_empty());
            pairs.insert(place.index(pairs.len() + 1), damage);
            prop_assert!(parse(&pairs.join(",")).is_err());
        }
    }
}
