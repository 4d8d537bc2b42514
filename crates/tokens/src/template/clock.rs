//! `strftime_now`: dates as Python's `strftime` writes them in the C locale.

use std::time::{SystemTime, UNIX_EPOCH};

/// A moment: seconds since 1970 on the wall clock of the place where the prompt is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now(pub i64);

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl Now {
    /// The system's clock, in UTC.
    pub fn of_system() -> Self {
        let seconds =
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Now(i64::try_from(seconds).unwrap_or(0))
    }

    /// The moment as `strftime` would write it; directives that are not known stay as they are.
    pub fn format(self, format: &str) -> String {
        // A million years either way are enough, and keep the sums in range.
        let seconds = self.0.clamp(-31_556_952_000_000, 31_556_952_000_000);
        let days = seconds.div_euclid(86400);
        let second = seconds.rem_euclid(86400);
        let (year, month, day) = civil(days);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let weekday = (days + 4).rem_euclid(7);
        let in_year = days - days_from(year, 1, 1) + 1;
        let half = if hour % 12 == 0 { 12 } else { hour % 12 };
        let (month_name, day_name) = (MONTHS[(month - 1) as usize], DAYS[weekday as usize]);

        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(c) = characters.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut rest = characters.clone();
            let mut directive = rest.next();
            let bare = directive == Some('-');
            if bare {
                directive = rest.next();
            }
            let number = |value: i64, width: usize| match bare {
                true => value.to_string(),
                false => format!("{value:0width$}"),
            };
            text += &match directive {
                Some('Y') => year.to_string(),
                Some('y') => number(year.rem_euclid(100), 2),
                Some('m') => number(month, 2),
                Some('d') => number(day, 2),
                Some('e') => format!("{day:2}"),
                Some('H') => number(hour, 2),
                Some('I') => number(half, 2),
                Some('M') => number(minute, 2),
                Some('S') => number(second, 2),
                Some('f') => "000000".to_string(),
                Some('j') => number(in_year, 3),
                Some('p') => (if hour < 12 { "AM" } else { "PM" }).to_string(),
                Some('B') => month_name.to_string(),
                Some('b' | 'h') => month_name[..3].to_string(),
                Some('A') => day_name.to_string(),
                Some('a') => day_name[..3].to_string(),
                Some('w') => weekday.to_string(),
                Some('u') => (if weekday == 0 { 7 } else { weekday }).to_string(),
                Some('F') => format!("{year}-{month:02}-{day:02}"),
                Some('T' | 'X') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('R') => format!("{hour:02}:{minute:02}"),
                Some('D' | 'x') => format!("{month:02}/{day:02}/{:02}", year.rem_euclid(100)),
                Some('c') => format!(
                    "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year}",
                    &day_name[..3],
                    &month_name[..3]
                ),
                // A naive datetime has no zone.
                Some('Z' | 'z') => String::new(),
                Some('n') => "\n".to_string(),
                Some('t') => "\t".to_string(),
                Some('%') => "%".to_string(),
                _ => {
                    text.push('%');
                    continue;
                }
            };
            characters = rest;
        }
        text
    }
}

/// Year, month and day of a day counted from 1970-01-01 (Howard Hinnant, "chrono-compatible
/// low-level date algorithms": years begin in March, so leap days end them).
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

/// The inverse of [`civil`].
fn days_from(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let shifted = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * shifted + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats() {
        // 2024-02-29 15:04:05, a Thursday.
        let now = Now(1_709_219_045);
        for (format, expected) in [
            ("%d %b %Y", "29 Feb 2024"),
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 15:04:05"),
            ("%A, %B %-d, %y", "Thursday, February 29, 24"),
            ("%I:%M %p day %j", "03:04 PM day 060"),
            ("%F %T %D %a %u %w", "2024-02-29 15:04:05 02/29/24 Thu 4 4"),
            ("100%% %Q %", "100% %Q %"),
            ("%Z%z%e", "29"),
        ] {
            assert_eq!(now.format(format), expected);
        }
        assert_eq!(Now(0).format("%c"), "Thu Jan  1 00:00:00 1970");
        assert_eq!(Now(-1).format("%F %T"), "1969-12-31 23:59:59");
        assert_eq!(Now(i64::MIN).format("%m"), Now(i64::MIN).format("%m"));
    }

    #[test]
    fn days_there_and_back() {
        for day in (-800_000..800_000).step_by(97) {
            let (y, m, d) = civil(day);
            assert_eq!(days_from(y, m, d), day);
            assert!((1..=12).contains(&m) && (1..=31).contains(&d));
        }
    }
}
