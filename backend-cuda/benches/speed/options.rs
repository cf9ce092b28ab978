//! The command line.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};

/// The options of a run.
#[derive(Debug)]
pub(crate) struct Options {
    /// Small sizes and few bursts, to check that everything runs. No bar is judged.
    pub(crate) quick: bool,
    /// Set if neither `cargo bench` nor a user with options started this, but `cargo test` with all targets. The run
    /// then only checks that everything works, if CUDA is present.
    pub(crate) as_test: bool,
    /// The file for the table as JSON.
    pub(crate) json: Option<PathBuf>,
    /// Pairs of bursts for each row.
    pub(crate) pairs: usize,
    /// Bytes that are page-locked.
    pub(crate) pin_bytes: usize,
    /// Bytes that are copied.
    pub(crate) copy_bytes: usize,
    /// Bytes of a workspace, of both sides.
    pub(crate) workspace_bytes: usize,
    only: Vec<String>,
}

impl Options {
    pub(crate) fn parse(arguments: impl Iterator<Item = String>, groups: &[&str]) -> Result<Self> {
        let (mut json, mut only) = (None, Vec::new());
        let (mut pairs, mut pin_bytes, mut copy_bytes, mut workspace_bytes) = (None, None, None, None);
        let mut arguments = arguments.peekable();
        let as_test = arguments.peek().is_none();
        let mut quick = as_test;
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                // The argument that cargo adds.
                "--bench" => {}
                "--quick" => quick = true,
                "--json" => json = Some(PathBuf::from(value()?)),
                "--pairs" => pairs = Some(bytes(&value()?)?),
                "--pin-bytes" => pin_bytes = Some(bytes(&value()?)?),
                "--copy-bytes" => copy_bytes = Some(bytes(&value()?)?),
                "--workspace-bytes" => workspace_bytes = Some(bytes(&value()?)?),
                "--only" => only.extend(value()?.split(',').map(str::to_owned)),
                other => bail!("there is no option {other}"),
            }
        }
        if let Some(unknown) = only.iter().find(|name| !groups.contains(&name.as_str())) {
            bail!("there are no rows {unknown}");
        }
        let usual = |small, large| if quick { small } else { large };
        let options = Self {
            quick,
            as_test,
            json,
            pairs: pairs.unwrap_or(usual(4, 400)),
            pin_bytes: pin_bytes.unwrap_or(usual(8 << 20, 8 << 30)),
            copy_bytes: copy_bytes.unwrap_or(usual(1 << 20, 1 << 30)),
            workspace_bytes: workspace_bytes.unwrap_or(usual(64 << 10, 32 << 20)),
            only,
        };
        ensure!(quick || options.pairs >= 200, "{} pairs are too few to judge: give 200 or more", options.pairs);
        let sizes = [options.pairs, options.pin_bytes, options.copy_bytes, options.workspace_bytes];
        ensure!(sizes.iter().all(|&size| size > 0), "sizes and numbers are above 0");
        ensure!(options.workspace_bytes.is_multiple_of(256), "--workspace-bytes is a multiple of 256");
        Ok(options)
    }

    /// Returns whether a group of rows was selected.
    pub(crate) fn wants(&self, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == group)
    }
}

/// Parses a number, with an optional suffix KiB, MiB or GiB.
fn bytes(text: &str) -> Result<usize> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.trim() {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        other => bail!("{other} is no unit: give KiB, MiB, GiB or none"),
    };
    let number: usize = number.parse().with_context(|| format!("{text} is no number"))?;
    number.checked_mul(1 << shift).with_context(|| format!("{text} is too much"))
}

pub(crate) fn usage(groups: &[&str]) -> String {
    format!(
        "cargo bench -p highwater-cuda --bench speed -- [--bench] [--quick] [--json FILE] [--pairs N] [--pin-bytes N] \
         [--copy-bytes N] [--workspace-bytes N] [--only ROWS,...]\nWithout any option: as with --quick. cargo runs this in the package's folder, so FILE is best absolute.\nrows: {}",
        groups.join(", ")
    )
}
