//! llama.cpp's spelling of flags.

use std::ffi::OsString;

/// Flags of several letters after a single dash, and what they are called here.
const SHORT_WORDS: &[(&str, &str)] = &[
    ("-ngl", "--ngl"),
    ("-ot", "--override-tensor"),
    ("-ts", "--tensor-split"),
    ("-dev", "--device"),
    ("-ub", "--ubatch-size"),
    ("-nr", "--no-repack"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
];

/// Arguments with llama.cpp's spellings replaced, up to `--`.
pub fn translate(arguments: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    let mut flags = true;
    arguments.map(move |argument| {
        flags &= argument != "--";
        let known = argument.to_str().filter(|_| flags).and_then(|text| {
            let (word, value) = text
                .find('=')
                .map_or((text, ""), |equals| text.split_at(equals));
            let (_, long) = SHORT_WORDS.iter().find(|(short, _)| *short == word)?;
            Some(format!("{long}{value}").into())
        });
        known.unwrap_or(argument)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_words_become_long_ones() {
        let translated = |line: &str| {
            let words = translate(line.split(' ').map(OsString::from));
            let words: Vec<_> = words.map(|word| word.into_string().unwrap()).collect();
            words.join(" ")
        };
        assert_eq!(translated("run -ngl 3 -n 4"), "run --ngl 3 -n 4");
        assert_eq!(
            translated("-ngl=3 -ot=a=cpu"),
            "--ngl=3 --override-tensor=a=cpu"
        );
        assert_eq!(translated("-ts 1,2 -- -ts"), "--tensor-split 1,2 -- -ts");
        assert_eq!(translated("-t 2 --ngl 1 -nglx"), "-t 2 --ngl 1 -nglx");
    }
}
