//! How far something long has come, with rate and time left: in place on a terminal, a line every tenth elsewhere.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use crate::output::{complain, size};

/// How often a terminal's line changes, and what takes no longer needs no line.
const REDRAW: Duration = Duration::from_millis(200);
/// Weight of the newest rate in the mean that is shown.
const NEWEST: f64 = 0.2;

/// Shows the progress of one thing after the other.
pub struct Meter {
    terminal: bool,
    /// Whether what was shown stays to be read afterwards.
    stays: bool,
    what: &'static str,
    /// When and where the shown mean was last brought up to date.
    drawn: (Instant, u64),
    /// Bytes a second, once a line has been shown.
    rate: Option<f64>,
    tenth: u64,
}

impl Meter {
    /// For what somebody asked for and may want to read about later.
    pub fn new() -> Self {
        let (terminal, drawn) = (stderr().is_terminal(), (Instant::now(), 0));
        Meter { terminal, stays: true, what: "", drawn, rate: None, tenth: 0 }
    }

    /// For a wait on the way to something else: a terminal's line that goes when it is over, nothing elsewhere.
    pub fn passing() -> Self {
        Meter { stays: false, ..Meter::new() }
    }

    /// Shows that `done` of `total` bytes are done of this.
    pub fn show(&mut self, what: &'static str, done: u64, total: u64) {
        let now = Instant::now();
        let tenth = 10 * done / total.max(1);
        if what != self.what {
            self.end();
            // What was done before does not count as speed.
            (self.what, self.drawn, self.tenth) = (what, (now, done), tenth);
            return;
        }
        let passed = now - self.drawn.0;
        if tenth == self.tenth && passed < REDRAW {
            return;
        }
        let newest = done.saturating_sub(self.drawn.1) as f64 / passed.as_secs_f64().max(1e-6);
        let mean = |rate| rate + NEWEST * (newest - rate);
        let rate = self.rate.map_or(newest, mean);
        self.rate = Some(rate);
        self.drawn = (now, done);
        let line = line(what, done, total, rate);
        if self.terminal {
            // Nobody is to be told if stderr is gone.
            let _ = write!(stderr(), "\r\x1b[K{line}");
        } else if self.stays && tenth > self.tenth {
            complain(&line);
        }
        self.tenth = tenth;
    }

    /// Leaves the last line standing, or takes it away.
    pub fn end(&mut self) {
        if self.rate.take().is_some() && self.terminal {
            let _ = write!(stderr(), "{}", if self.stays { "\n" } else { "\r\x1b[K" });
        }
    }
}

/// What comes next, an error too, begins on a line of its own.
impl Drop for Meter {
    fn drop(&mut self) {
        self.end();
    }
}

fn line(what: &str, done: u64, total: u64, rate: f64) -> String {
    let percent = 100 * done / total.max(1);
    let left = total.saturating_sub(done);
    let seconds = if rate > 0.0 { left as f64 / rate } else { f64::INFINITY };
    let (done, total, rate) = (size(done), size(total), size(rate as u64));
    format!("{what} {percent:>3} %  {done} of {total}  {rate}/s  {}", time_left(seconds))
}

/// Seconds in the two units that suit them.
fn time_left(seconds: f64) -> String {
    match seconds {
        s if s.is_infinite() => "stalled".into(),
        s if s < 60.0 => format!("{s:.0} s left"),
        s if s < 3600.0 => format!("{} min {:02} s left", s as u64 / 60, s as u64 % 60),
        s => format!("{} h {:02} min left", s as u64 / 3600, s as u64 / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_much_how_fast_and_how_long() {
        assert_eq!(
            line("fetching", 2_000_000_000, 8_000_000_000, 50e6),
            "fetching  25 %  2.0 GB of 8.0 GB  50.0 MB/s  2 min 00 s left"
        );
        assert_eq!(line("fetching", 0, 0, 0.0), "fetching   0 %  0 B of 0 B  0 B/s  stalled");
        assert_eq!(time_left(59.0), "59 s left");
        assert_eq!(time_left(7_265.0), "2 h 01 min left");
    }
}
