//! A file of answers: a header of comments, then one line for each cell.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use highwater_simulated_harness::Answer;

/// Stands between a cell and its answer.
const ARROW: &str = " -> ";

/// The answer of a cell about two devices on a machine with one.
pub(crate) const LEFT_OUT: &str = "left out";

/// Answers in the order of the table.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) header: Vec<String>,
    lines: Vec<(String, String)>,
}

impl Record {
    pub(crate) fn add(&mut self, cell: String, answer: String) {
        self.lines.push((cell, answer));
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.len()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If the file cannot be read, or a line is no answer or answers a cell again. The error names the first such line.
    pub(crate) fn read(file: &Path) -> Answer<Self> {
        let of = |problem: String| format!("{}: {problem}", file.display());
        let text = std::fs::read_to_string(file).map_err(|error| of(error.to_string()))?;
        let mut record = Self::default();
        let mut seen = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            if let Some(comment) = line.strip_prefix('#') {
                record.header.push(comment.trim().to_owned());
                continue;
            }
            let number = index + 1;
            let (cell, answer) =
                line.split_once(ARROW).ok_or_else(|| of(format!("line {number} is not `cell{ARROW}answer`")))?;
            if let Some(first) = seen.insert(cell.to_owned(), number) {
                return Err(of(format!("line {number} answers `{cell}`, as line {first} does")));
            }
            record.add(cell.to_owned(), answer.to_owned());
        }
        Ok(record)
    }

    /// Writes a file whole, or leaves it as it was.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn write(&self, file: &Path) -> Answer {
        let draft = file.with_extension("draft");
        std::fs::write(&draft, self.to_string())
            .and_then(|()| std::fs::rename(&draft, file))
            .map_err(|error| format!("{}: {error}", file.display()))
    }

    /// Returns how many cells were left out for lack of a device.
    pub(crate) fn left_out(&self) -> usize {
        self.lines.iter().filter(|(_, answer)| answer == LEFT_OUT).count()
    }

    /// Returns a line for each cell whose answer in `recorded` differs or is absent. If the run is `whole`, a recorded cell that
    /// was not run is a difference too. Cells that were left out here are no differences.
    pub(crate) fn differences(&self, recorded: &Self, whole: bool) -> Vec<String> {
        let mut expected: HashMap<&str, &str> =
            recorded.lines.iter().map(|(cell, answer)| (cell.as_str(), answer.as_str())).collect();
        let mut differences = Vec::new();
        for (cell, seen) in &self.lines {
            match expected.remove(cell.as_str()) {
                Some(answer) if answer == seen && answer != LEFT_OUT => {}
                Some(answer) if seen == LEFT_OUT && answer != LEFT_OUT => {}
                Some(answer) => differences.push(format!("{cell}\n    recorded: {answer}\n    here:     {seen}")),
                None => differences.push(format!("{cell}\n    recorded: nothing\n    here:     {seen}")),
            }
        }
        if whole {
            let mut left: Vec<_> = expected.into_keys().collect();
            left.sort_unstable();
            differences.extend(left.into_iter().map(|cell| format!("{cell}\n    recorded, and no cell of the table")));
        }
        differences
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.header {
            writeln!(f, "# {line}")?;
        }
        self.lines.iter().try_for_each(|(cell, answer)| writeln!(f, "{cell}{ARROW}{answer}"))
    }
}
