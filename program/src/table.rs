//! Tables that fit the terminal. Below 80 columns they have no lines. Without a terminal, their width is unlimited.

use std::fmt;
use std::io::{IsTerminal as _, stdout};

use comfy_table::{CellAlignment, ContentArrangement, presets};

/// The width below which the cells of a row are stacked.
const LEAST_WIDTH: usize = 80;

#[derive(Debug, Default)]
pub(super) struct Table {
    /// One text for each column; empty if the first column names each row.
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    numbers: bool,
    /// The width where standard output has none; `None` means unlimited.
    at_most: Option<usize>,
}

impl Table {
    /// Returns a table with a header, and lines between its rows.
    pub(super) fn with_header<const COLUMNS: usize>(header: [&'static str; COLUMNS]) -> Self {
        Self { header: header.into(), ..Self::default() }
    }

    /// Returns a table of numbers with a header, without lines between its rows.
    pub(super) fn of_numbers<const COLUMNS: usize>(header: [&'static str; COLUMNS]) -> Self {
        Self { numbers: true, ..Self::with_header(header) }
    }

    /// Limits the width where standard output has none.
    pub(super) fn at_most(mut self, columns: usize) -> Self {
        self.at_most = Some(columns);
        self
    }

    pub(super) fn add_row<const COLUMNS: usize>(&mut self, row: [impl Into<String>; COLUMNS]) {
        self.rows.push(row.into_iter().map(Into::into).collect());
    }

    /// Formats the table for a terminal of this width. `None` means unlimited.
    pub(super) fn to_text(&self, width: Option<usize>) -> String {
        match width {
            Some(width) if width < LEAST_WIDTH => self.stacked(width),
            width => self.framed(width),
        }
    }

    fn framed(&self, width: Option<usize>) -> String {
        let mut table = comfy_table::Table::new();
        let is_condensed = self.header.is_empty() || self.numbers;
        table.load_style(if is_condensed { presets::UTF8_FULL_CONDENSED } else { presets::UTF8_FULL });
        if let Some(width) = width {
            let width = u16::try_from(width).unwrap_or(u16::MAX);
            table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        }
        if !self.header.is_empty() {
            table.set_header(&self.header);
        }
        table.add_rows(&self.rows);
        if self.numbers {
            table.column_iter_mut().for_each(|column| {
                column.set_cell_alignment(CellAlignment::Right);
            });
        }
        table.to_string()
    }

    /// Writes each cell after its heading, or below it if the line is too short.
    fn stacked(&self, width: usize) -> String {
        let mut lines: Vec<String> = Vec::new();
        for row in &self.rows {
            if !self.header.is_empty() && !lines.is_empty() {
                lines.push(String::new());
            }
            if let ([], [name, values @ ..]) = (&self.header[..], &row[..]) {
                values.iter().for_each(|value| wrap(&format!("{name}: {value}"), width, &mut lines));
            } else {
                self.header
                    .iter()
                    .zip(row)
                    .for_each(|(name, value)| wrap(&format!("{name}: {value}"), width, &mut lines));
            }
        }
        lines.join("\n")
    }
}

/// Breaks lines between words and indents all but the first line of a text. A word that is too long starts on the next
/// line.
fn wrap(text: &str, width: usize, lines: &mut Vec<String>) {
    let mut indent = "";
    for line in text.lines() {
        let mut current = indent.to_owned();
        for word in line.split(' ') {
            let used = current.chars().count();
            if used > indent.len() && used + 1 + word.chars().count() > width {
                lines.push(current);
                indent = "  ";
                current = format!("{indent}{word}");
            } else {
                if used > indent.len() {
                    current.push(' ');
                }
                current += word;
            }
        }
        lines.push(current);
        indent = "  ";
    }
}

impl fmt::Display for Table {
    /// Formats the table for standard output.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(width().or(self.at_most)))
    }
}

/// Breaks the lines of a text that stands outside a table, for standard output.
pub(super) fn wrapped(text: &str) -> String {
    let Some(width) = width() else { return text.to_owned() };
    let mut lines = Vec::new();
    wrap(text, width, &mut lines);
    lines.join("\n")
}

/// Returns the width of the terminal on standard output, else the value of `COLUMNS`. `None` means unlimited.
fn width() -> Option<usize> {
    let of_terminal = || {
        let size = rustix::termios::tcgetwinsize(stdout()).ok()?;
        Some(usize::from(size.ws_col)).filter(|&columns| columns > 0)
    };
    let of_variable = || std::env::var("COLUMNS").ok()?.parse().ok().filter(|&columns: &usize| columns > 0);
    stdout().is_terminal().then(of_terminal).flatten().or_else(of_variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::with_header(["backend", "why"]);
        table.add_row([
            "cuda",
            "the driver could not be opened because there is no file of that name anywhere on this machine",
        ]);
        table.add_row(["mock", "it works\nhint: use it"]);
        table
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap()
    }

    #[test]
    fn a_table_is_as_wide_as_the_terminal_allows() {
        for width in [80, 100, 110] {
            assert!(widest(&table().to_text(Some(width))) <= width, "{}", table());
        }
        let free = table().to_text(None);
        assert!(widest(&free) > 100 && free.contains("name anywhere on this machine │"), "{free}");
        assert!(widest(&table().to_text(Some(500))) <= widest(&free));
    }

    #[test]
    fn below_80_columns_the_cells_are_stacked_and_no_word_is_lost() {
        for width in [79, 40, 20, 1] {
            let text = table().to_text(Some(width));
            assert!(!text.contains('│') && text.contains("backend: cuda\nwhy: the") || width < 20, "{text}");
            assert!(widest(&text) <= width.max(12), "{width}: {text}");
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let all = "backend: cuda why: the driver could not be opened because there is no file of that name anywhere on \
                       this machine backend: mock why: it works hint: use it";
            assert_eq!(words(&text), words(all));
        }
        assert!(table().to_text(Some(60)).ends_with("\n\nbackend: mock\nwhy: it works\n  hint: use it"));
    }

    #[test]
    fn a_list_of_values_and_one_of_numbers_are_stacked_too() {
        let mut list = Table::default();
        list.add_row(["backend", "mock (asked for)"]);
        list.add_row(["leaks", "0"]);
        assert_eq!(list.to_text(Some(60)), "backend: mock (asked for)\nleaks: 0");
        assert!(list.to_text(None).contains("│ leaks   ┆ 0"), "{}", list.to_text(None));
        let mut numbers = Table::of_numbers(["workers", "speed"]);
        numbers.add_row(["1", "10"]);
        numbers.add_row(["2", "20"]);
        assert_eq!(numbers.to_text(Some(60)), "workers: 1\nspeed: 10\n\nworkers: 2\nspeed: 20");
        assert!(numbers.to_text(Some(90)).contains("│       1 ┆    10 │"), "{}", numbers.to_text(Some(90)));
    }
}
