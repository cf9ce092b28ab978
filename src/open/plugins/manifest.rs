//! The manifest of a plugin: a small TOML file `NAME.toml`, read strictly.
//!
//! An unknown key is an error: most are typing errors, and this version would not obey a key of a later one.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use highwater_hal::display_foreign;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::permission::text_of;

/// The size limit, far more than a manifest needs.
const MOST_BYTES: u64 = 64 * 1024;
/// Characters of a name.
const LONGEST_NAME: usize = 64;

/// The keys of a manifest, all of them required.
const KEYS: [&str; 6] = ["name", "version", "vendor", "licence", "table_versions", "library"];
const TABLE_KEYS: [&str; 2] = ["min", "max"];

/// The platform of this program, as manifests name it: `x86_64-linux`.
pub(super) fn platform() -> String {
    format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS)
}

/// The contents of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    pub(super) name: String,
    pub(super) version: String,
    /// Versions of the table that the plugin offers.
    pub(super) table_versions: RangeInclusive<u32>,
    /// The library for each platform.
    pub(super) libraries: BTreeMap<String, PathBuf>,
}

/// A fault of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    /// The line, from 1; `None` if the file could not be read.
    pub(super) line: Option<usize>,
    pub(super) what: String,
    pub(super) hint: String,
}

impl Fault {
    fn of_file(what: impl Into<String>, hint: &str) -> Self {
        Self { line: None, what: what.into(), hint: hint.into() }
    }
}

/// Returns whether `name` can be the name of a backend.
pub(super) fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    name.len() <= LONGEST_NAME && name.chars().all(allowed) && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Reads the text of a manifest file.
///
/// Reads only a small regular file: a pipe would wait for a writer.
pub(super) fn read(path: &Path) -> Result<String, Fault> {
    let unreadable = |error: io::Error| {
        Fault::of_file(
            format!("it cannot be read: {}", text_of(&error)),
            "check its permissions, and the targets of its links",
        )
    };
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file: File = OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "it is a folder" } else { "it is not a regular file" };
        return Err(Fault::of_file(what, "a manifest is a text file; remove or rename this"));
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > MOST_BYTES {
        let what = format!("it is {} bytes long; at most {MOST_BYTES} are allowed", metadata.len());
        return Err(Fault::of_file(what, "a manifest has a dozen lines; remove or rename this"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count();
        Fault { line: Some(line), what: "it is not UTF-8 here".into(), hint: "save it as UTF-8".into() }
    })
}

/// Returns whether a text is meant to be a manifest, valid or not: it has the sections that other TOML files lack.
pub(super) fn is_meant(text: &str) -> bool {
    let section = |line: &str| line.starts_with("[library]") || line.starts_with("table_versions");
    text.lines().any(|line| section(line.trim_start()))
}

impl Manifest {
    /// Parses a text.
    pub(super) fn parse(text: &str) -> Result<Self, Fault> {
        let root = DeTable::parse(text).map_err(|error| {
            let line = Some(line_of(text, error.span().unwrap_or_default()));
            Fault {
                line,
                what: display_foreign(&error.message().trim().replace('\n', ", ")).to_string(),
                hint: "see the TOML format, https://toml.io".into(),
            }
        })?;
        let table = Table { text, name: "", place: 0..0, entries: root.get_ref() };
        table.check_keys(&KEYS)?;
        let name = table.text("name")?;
        if !is_name(&name) {
            let hint = "a name has up to 64 ASCII letters, digits, `-` and `_`, and begins with a letter or digit";
            return Err(table.fault(
                "name",
                format!("`name` is `{}`, which is not a name", display_foreign(&name)),
                hint,
            ));
        }
        let [_vendor, _licence] = [table.text("vendor")?, table.text("licence")?];
        let version = table.text("version")?;

        let versions = table.table("table_versions", "a table such as `{ min = 1, max = 1 }`")?;
        versions.check_keys(&TABLE_KEYS)?;
        let (min, max) = (versions.number("min")?, versions.number("max")?);
        if min > max {
            let what = format!("`table_versions.min` is {min}, more than `table_versions.max`, {max}");
            return Err(versions.fault(
                "min",
                what,
                "give the oldest and the newest version of the table that the plugin offers",
            ));
        }

        let platforms = table.table("library", "a section with one line for each platform")?;
        let mut libraries = BTreeMap::new();
        for key in platforms.entries.keys() {
            let key = key.get_ref();
            libraries.insert(key.to_string(), PathBuf::from(platforms.text(key)?));
        }
        if libraries.is_empty() {
            let what = "`[library]` is empty";
            let hint = format!("add a line for each platform, such as `{} = \"libhighwater_{name}.so\"`", platform());
            return Err(table.fault("library", what.into(), &hint));
        }
        Ok(Self { name, version, table_versions: min..=max, libraries })
    }
}

/// A table of a manifest.
struct Table<'t> {
    text: &'t str,
    /// Its key; empty for the file itself.
    name: &'t str,
    /// Its place in the text.
    place: Range<usize>,
    entries: &'t DeTable<'t>,
}

impl<'t> Table<'t> {
    /// Returns a key with the table's own before it.
    fn full(&self, key: &str) -> String {
        let key = display_foreign(key);
        if self.name.is_empty() { key.to_string() } else { format!("{}.{key}", self.name) }
    }

    fn at(&self, place: Range<usize>, what: String, hint: &str) -> Fault {
        Fault { line: Some(line_of(self.text, place)), what, hint: hint.into() }
    }

    /// Returns a fault of the value of an existing key.
    fn fault(&self, key: &str, what: String, hint: &str) -> Fault {
        let place = self.entries.get_key_value(key).map_or(self.place.clone(), |(key, _)| key.span());
        self.at(place, what, hint)
    }

    /// Checks that no key is unknown and none is missing.
    fn check_keys(&self, known: &[&str]) -> Result<(), Fault> {
        let mut unknown: Vec<_> = self.entries.keys().filter(|key| !known.contains(&&**key.get_ref())).collect();
        unknown.sort_by_key(|key| key.span().start);
        let all: Vec<String> = known.iter().map(|key| format!("`{}`", self.full(key))).collect();
        if let Some(key) = unknown.first() {
            let what = format!("the key `{}` is unknown; known are {}", self.full(key.get_ref()), all.join(", "));
            return Err(self.at(key.span(), what, "correct or remove the line"));
        }
        let missing: Vec<String> = known
            .iter()
            .filter(|key| !self.entries.contains_key(**key))
            .map(|key| format!("`{}`", self.full(key)))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let what = match &missing[..] {
            [one] => format!("the key {one} is missing"),
            more => format!("the keys {} are missing", more.join(", ")),
        };
        Err(self.at(self.place.clone(), what, &format!("a manifest has {}", all.join(", "))))
    }

    fn value(&self, key: &str) -> Result<&'t Spanned<DeValue<'t>>, Fault> {
        self.entries
            .get(key)
            .ok_or_else(|| self.at(self.place.clone(), format!("the key `{}` is missing", self.full(key)), "add it"))
    }

    /// Returns a fault that names the expected type of a key.
    fn mistyped(&self, key: &str, value: &Spanned<DeValue<'_>>, expected: &str) -> Fault {
        let what = format!("`{}` is {}, not {expected}", self.full(key), with_article(value.get_ref().type_str()));
        self.at(value.span(), what, &format!("give {expected}"))
    }

    fn text(&self, key: &str) -> Result<String, Fault> {
        let value = self.value(key)?;
        let text = value.get_ref().as_str().ok_or_else(|| self.mistyped(key, value, "a text in quotes"))?;
        if text.trim().is_empty() || text.contains('\0') {
            let what = format!("`{}` is empty or has a NUL character", self.full(key));
            return Err(self.at(value.span(), what, "give a text"));
        }
        Ok(text.to_owned())
    }

    fn number(&self, key: &str) -> Result<u32, Fault> {
        let value = self.value(key)?;
        let number = value.get_ref().as_integer().ok_or_else(|| self.mistyped(key, value, "a whole number"))?;
        let read = u32::from_str_radix(number.as_str(), number.radix()).ok().filter(|&number| number > 0);
        read.ok_or_else(|| {
            let what = format!(
                "`{}` is {}, not a number from 1 to {}",
                self.full(key),
                display_foreign(number.as_str()),
                u32::MAX
            );
            self.at(value.span(), what, "give a version of the table")
        })
    }

    fn table(&self, key: &'t str, expected: &str) -> Result<Table<'t>, Fault> {
        let value = self.value(key)?;
        let entries = value.get_ref().as_table().ok_or_else(|| self.mistyped(key, value, expected))?;
        let place = self.entries.get_key_value(key).map_or(value.span(), |(key, _)| key.span());
        Ok(Table { text: self.text, name: key, place, entries })
    }
}

fn with_article(kind: &str) -> String {
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {kind}")
}

/// Returns the line, from 1, on which a place begins.
fn line_of(text: &str, place: Range<usize>) -> usize {
    1 + text.as_bytes()[..place.start.min(text.len())].iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Folder, manifest_of};
    use super::*;

    /// The line and the text of what is wrong.
    fn fault(text: &str) -> (Option<usize>, String) {
        let fault = Manifest::parse(text).unwrap_err();
        assert!(!fault.hint.is_empty(), "{fault:?}");
        (fault.line, fault.what)
    }

    fn right() -> String {
        manifest_of("acme", "lib/libacme.so")
    }

    #[test]
    fn a_manifest_says_what_is_where() {
        let manifest = Manifest::parse(&(right() + "sparc64-linux = \"/opt/acme/lib.so\"\n")).unwrap();
        assert_eq!((manifest.name.as_str(), manifest.version.as_str()), ("acme", "1.2.0"));
        assert_eq!(manifest.table_versions, 1..=1);
        assert_eq!(manifest.libraries[&platform()], Path::new("lib/libacme.so"));
        assert_eq!(manifest.libraries["sparc64-linux"], Path::new("/opt/acme/lib.so"));
        // The same with the table as a section, and with numbers as TOML may write them.
        let section =
            right().replace("table_versions = { min = 1, max = 1 }\n", "") + "[table_versions]\nmin = 0x1\nmax = 1_0\n";
        assert_eq!(Manifest::parse(&section).unwrap().table_versions, 1..=10);
    }

    #[test]
    fn an_unknown_key_is_told_with_its_line_and_the_known_ones() {
        let (line, what) = fault(&right().replace("vendor", "vendro"));
        assert_eq!(line, Some(3));
        assert!(what.contains("`vendro` is unknown") && what.contains("`vendor`, `licence`"), "{what}");
        let (line, what) = fault(&right().replace("max = 1", "max = 1, most = 1"));
        assert_eq!(line, Some(5));
        assert!(what.contains("`table_versions.most` is unknown"), "{what}");
        assert!(what.contains("`table_versions.min`, `table_versions.max`"), "{what}");
    }

    #[test]
    fn missing_keys_are_all_named() {
        let (line, what) = fault("name = \"acme\"\n[library]\n");
        assert_eq!(line, Some(1));
        assert_eq!(what, "the keys `version`, `vendor`, `licence`, `table_versions` are missing");
        let (line, what) = fault(&right().replace(", max = 1", ""));
        assert_eq!((line, what.as_str()), (Some(5), "the key `table_versions.max` is missing"));
        assert_eq!(fault("").0, Some(1));
    }

    #[test]
    fn values_of_another_type_or_range_are_told_with_their_line() {
        for (old, new, line, expected) in [
            ("\"acme\"", "7", 1, "`name` is an integer, not a text in quotes"),
            ("\"acme\"", "\"a/b\"", 1, "`name` is `a/b`, which is not a name"),
            ("\"acme\"", "\" \"", 1, "`name` is empty"),
            ("\"MIT\"", "[\"MIT\"]", 4, "`licence` is an array, not a text in quotes"),
            ("min = 1", "min = \"1\"", 5, "`table_versions.min` is a string, not a whole number"),
            ("min = 1", "min = 0", 5, "`table_versions.min` is 0, not a number from 1 to"),
            ("min = 1", "min = -1", 5, "`table_versions.min` is -1, not a number from 1 to"),
            ("min = 1", "min = 99999999999999999999", 5, "`table_versions.min` is 99999999999999999999, not"),
            ("min = 1", "min = 2", 5, "`table_versions.min` is 2, more than `table_versions.max`, 1"),
            ("{ min = 1, max = 1 }", "1", 5, "`table_versions` is an integer, not a table"),
            ("\"lib/libacme.so\"", "true", 8, "is a boolean, not a text in quotes"),
        ] {
            let (found, what) = fault(&right().replace(old, new));
            assert_eq!(found, Some(line), "{new}: {what}");
            assert!(what.contains(expected), "{new}: {what}");
        }
        let empty = right().lines().take(7).collect::<Vec<_>>().join("\n");
        assert_eq!(fault(&empty), (Some(7), "`[library]` is empty".into()));
    }

    #[test]
    fn what_is_no_toml_is_told_with_its_line() {
        for (text, line) in [("name = \"acme\"\nversion =\n", 2), ("\n\n{", 3), ("name = \"a\"\nname = \"b\"\n", 2)] {
            let (found, what) = fault(text);
            assert_eq!(found, Some(line), "{text:?}: {what}");
            assert!(!what.is_empty() && !what.contains('\n'), "{what}");
        }
        // A thousand brackets deep: refused, and the stack is not used up.
        fault(&format!("name = {}", "[".repeat(10_000)));
    }

    #[test]
    fn only_a_small_text_file_is_read() {
        let folder = Folder::new();
        let what = |path: &Path| {
            let fault = read(path).unwrap_err();
            assert!(!fault.hint.is_empty());
            (fault.line, fault.what)
        };
        std::fs::create_dir(folder.path().join("folder.toml")).unwrap();
        assert_eq!(what(&folder.path().join("folder.toml")), (None, "it is a folder".into()));
        // A pipe without a writer would never give a byte.
        let pipe = folder.path().join("pipe.toml");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert_eq!(what(&pipe), (None, "it is not a regular file".into()));
        let huge = folder.file("huge.toml", vec![b'#'; 1 << 20]);
        assert_eq!(what(&huge), (None, "it is 1048576 bytes long; at most 65536 are allowed".into()));
        assert!(read(&folder.file("most.toml", vec![b'#'; 1 << 16])).is_ok());
        let latin = folder.file("latin.toml", b"name = \"a\"\nvendor = \"M\xfcller\"\n");
        assert_eq!(what(&latin), (Some(2), "it is not UTF-8 here".into()));
        assert!(what(&folder.path().join("none.toml")).1.contains("No such file"));
    }

    #[test]
    fn other_toml_files_are_not_meant() {
        assert!(is_meant(&right()) && is_meant("nonsense = \n [library]"));
        assert!(!is_meant("[package]\nname = \"x\"\n[lib]\n") && !is_meant(""));
    }
}
