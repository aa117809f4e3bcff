//! Log lines as MPS writes them: `[2024-04-23 06:04:59.389 Control    72] Starting control daemon …`.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// An open log; lines also go to the standard error.
#[derive(Debug)]
pub struct Log {
    file: Option<File>,
    who: &'static str,
}

impl Log {
    /// Opens the log in a folder, which is made. A folder that cannot be written leaves MPS without one.
    pub fn open(folder: &Path, name: &str, who: &'static str) -> Log {
        let _ = std::fs::create_dir_all(folder);
        let file = File::options().create(true).append(true).open(folder.join(name)).ok();
        Log { file, who }
    }

    pub fn line(&self, text: &str) {
        let line = format!("[{} {} {:5}] {text}\n", now(), self.who, std::process::id());
        if let Some(mut file) = self.file.as_ref() {
            let _ = file.write_all(line.as_bytes());
        }
        // Nobody may be reading any more.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// Date and time, UTC.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second, milli) = (second / 3600, second / 60 % 60, second % 60, since.subsec_millis());
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{milli:03}")
}

/// Year, month and day of a day since 1970, by Howard Hinnant's `civil_from_days`.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    #[test]
    fn days_have_dates() {
        assert_eq!(super::date(0), (1970, 1, 1));
        assert_eq!(super::date(11_016), (2000, 2, 29));
        assert_eq!(super::date(20_787), (2026, 11, 30));
    }
}
