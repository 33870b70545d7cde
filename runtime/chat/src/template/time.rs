//! Date and time for templates. The caller provides them, so that a prompt depends on nothing else.

/// A date and a time of day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateTime {
    /// Days since 1 January 1970.
    days: i64,
    /// Seconds since midnight.
    seconds: u32,
}

const DAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];
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

impl DateTime {
    /// Creates the local time for a Unix time, where clocks are ahead of UTC by `offset` seconds.
    pub fn new(unix_seconds: i64, offset: i32) -> Self {
        let local = unix_seconds.saturating_add(i64::from(offset));
        Self {
            days: local.div_euclid(86_400),
            seconds: local.rem_euclid(86_400) as u32,
        }
    }

    /// Returns the year, the month from 1, and the day from 1.
    pub fn date(self) -> (i64, u32, u32) {
        // Years start in March here, so that a leap day is the last day of its year.
        let days = self.days.saturating_add(719_468);
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = era * 400 + year_of_era + i64::from(month <= 2);
        (year, month as u32, day as u32)
    }

    /// Formats the time like Python's `strftime`. Unknown directives stay unchanged.
    pub fn format(self, format: &str) -> String {
        let (year, month, day) = self.date();
        let [hour, minute, second] = [
            self.seconds / 3600,
            self.seconds / 60 % 60,
            self.seconds % 60,
        ];
        let week_day = (self.days + 3).rem_euclid(7) as usize;
        let twelve = (hour + 11) % 12 + 1;
        let mut text = String::with_capacity(format.len() + 16);
        let mut rest = format.chars();
        while let Some(c) = rest.next() {
            if c != '%' {
                text.push(c);
                continue;
            }
            let mut directive = rest.next();
            let is_short = directive == Some('-');
            if is_short {
                directive = rest.next();
            }
            let two = |number: u32| {
                if is_short {
                    number.to_string()
                } else {
                    format!("{number:02}")
                }
            };
            text += &match directive {
                Some('Y') => year.to_string(),
                Some('y') => two(year.rem_euclid(100) as u32),
                Some('m') => two(month),
                Some('d') => two(day),
                Some('e') => format!("{day:2}"),
                Some('H') => two(hour),
                Some('I') => two(twelve),
                Some('M') => two(minute),
                Some('S') => two(second),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('A') => DAYS[week_day].to_owned(),
                Some('a') => DAYS[week_day][..3].to_owned(),
                Some('B') => MONTHS[month as usize - 1].to_owned(),
                Some('b' | 'h') => MONTHS[month as usize - 1][..3].to_owned(),
                Some('F') => self.format("%Y-%m-%d"),
                Some('T' | 'X') => self.format("%H:%M:%S"),
                Some('D' | 'x') => self.format("%m/%d/%y"),
                Some('R') => self.format("%H:%M"),
                Some('c') => self.format("%a %b %e %H:%M:%S %Y"),
                Some('j') => {
                    let first = (0..366).find(|back| {
                        Self {
                            days: self.days - back,
                            ..self
                        }
                        .date()
                        .1 == 1
                            && Self {
                                days: self.days - back,
                                ..self
                            }
                            .date()
                            .2 == 1
                    });
                    format!("{:03}", first.unwrap_or(0) + 1)
                }
                Some('Z' | 'z') => String::new(),
                Some('f') => "000000".to_owned(),
                Some('%') => "%".to_owned(),
                Some(other) => format!("%{other}"),
                None => "%".to_owned(),
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_in_python() {
        let time = DateTime::new(1_709_210_096, 0);
        for (format, text) in [
            ("%Y-%m-%d %H:%M:%S", "2024-02-29 12:34:56"),
            ("%d %b %Y, %A %a %B", "29 Feb 2024, Thursday Thu February"),
            ("%-d.%-m.%y %I %p %j %% %q %", "29.2.24 12 PM 060 % %q %"),
        ] {
            assert_eq!(time.format(format), text);
        }
        assert_eq!(
            DateTime::new(0, 3600).format("%c"),
            "Thu Jan  1 01:00:00 1970"
        );
        assert_eq!(DateTime::new(-1, 0).format("%F %T"), "1969-12-31 23:59:59");
        DateTime::new(i64::MAX, i32::MAX).format("%c");
        DateTime::new(i64::MIN, i32::MIN).format("%c");
    }
}
