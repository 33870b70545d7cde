//! The stages that a chain is made of, by name.

use super::error::SamplerError;
use std::fmt;

/// One stage of a sampler chain. Its numbers are in [`SamplerParams`](crate::SamplerParams).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Tokens seen lately become less likely.
    Penalties,
    /// Tokens that would go on repeating what came before become less likely.
    Dry,
    /// Keeps what is near the best logit, in standard deviations.
    TopNSigma,
    /// Keeps so many of the likeliest.
    TopK,
    /// Keeps what is about as surprising as is to be expected.
    TypicalP,
    /// Keeps the likeliest that together have a probability.
    TopP,
    /// Keeps what has a share of the best probability.
    MinP,
    /// Sometimes drops the likeliest.
    Xtc,
    /// Divides the logits.
    Temperature,
    /// Keeps what fits into a gap in a text.
    Infill,
    /// Draws near a target probability. It is the draw, so its place does not matter.
    AdaptiveP,
}

impl Stage {
    /// The order of llama.cpp.
    pub const DEFAULT: [Self; 9] = [
        Self::Penalties,
        Self::Dry,
        Self::TopNSigma,
        Self::TopK,
        Self::TypicalP,
        Self::TopP,
        Self::MinP,
        Self::Xtc,
        Self::Temperature,
    ];

    /// All stages with their letters and names. The first name is the one that is written.
    const TABLE: [(Self, char, &'static [&'static str]); 11] = [
        (Self::Penalties, 'e', &["penalties"]),
        (Self::Dry, 'd', &["dry"]),
        (Self::TopNSigma, 's', &["top_n_sigma"]),
        (Self::TopK, 'k', &["top_k"]),
        (
            Self::TypicalP,
            'y',
            &["typ_p", "typical_p", "typical", "typ"],
        ),
        (Self::TopP, 'p', &["top_p", "nucleus"]),
        (Self::MinP, 'm', &["min_p"]),
        (Self::Xtc, 'x', &["xtc"]),
        (Self::Temperature, 't', &["temperature", "temp"]),
        (Self::Infill, 'i', &["infill"]),
        (Self::AdaptiveP, 'a', &["adaptive_p"]),
    ];

    /// The name in lists.
    pub fn name(self) -> &'static str {
        self.entry().2[0]
    }

    /// The letter in sequences.
    pub fn letter(self) -> char {
        self.entry().1
    }

    fn entry(self) -> (Self, char, &'static [&'static str]) {
        Self::TABLE[self as usize]
    }

    /// Reads names with `;` between them, such as `top_k;temperature`. Nothing gives no stage.
    ///
    /// ```
    /// use samite_text::Stage;
    ///
    /// assert_eq!(Stage::parse_list("top-k; temp")?, [Stage::TopK, Stage::Temperature]);
    /// assert_eq!(Stage::parse_list("top-k; temp")?, Stage::parse_letters("kt")?);
    /// # Ok::<(), samite_text::SamplerError>(())
    /// ```
    ///
    /// # Errors
    /// [`SamplerError::UnknownStage`].
    pub fn parse_list(text: &str) -> Result<Vec<Self>, SamplerError> {
        let names = text
            .split(';')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        names
            .map(|name| {
                let plain = name.to_ascii_lowercase().replace('-', "_");
                let mut table = Self::TABLE.iter();
                let found = table.find(|(_, _, names)| names.contains(&&*plain));
                found
                    .map(|entry| entry.0)
                    .ok_or_else(|| SamplerError::UnknownStage {
                        name: name.to_owned(),
                        known: Self::list(Self::TABLE.iter().map(|entry| entry.0)),
                    })
            })
            .collect()
    }

    /// Reads letters, such as `kt`.
    ///
    /// # Errors
    /// [`SamplerError::UnknownStage`].
    pub fn parse_letters(text: &str) -> Result<Vec<Self>, SamplerError> {
        text.chars()
            .map(|letter| {
                let found = Self::TABLE.iter().find(|entry| entry.1 == letter);
                found
                    .map(|entry| entry.0)
                    .ok_or_else(|| SamplerError::UnknownStage {
                        name: letter.to_string(),
                        known: Self::letters(Self::TABLE.iter().map(|entry| entry.0)),
                    })
            })
            .collect()
    }

    /// Names with `;` between them.
    pub fn list(stages: impl IntoIterator<Item = Self>) -> String {
        let names: Vec<_> = stages.into_iter().map(Self::name).collect();
        names.join(";")
    }

    /// Letters.
    pub fn letters(stages: impl IntoIterator<Item = Self>) -> String {
        stages.into_iter().map(Self::letter).collect()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_stages() {
        for (index, (stage, ..)) in Stage::TABLE.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
        }
        assert_eq!(Stage::letters(Stage::DEFAULT), "edskypmxt");
        assert_eq!(
            Stage::list(Stage::DEFAULT),
            "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
        );
    }

    #[test]
    fn names_and_letters_are_read_back() {
        let all = Stage::TABLE.map(|entry| entry.0);
        assert_eq!(Stage::parse_list(&Stage::list(all)), Ok(all.to_vec()));
        assert_eq!(Stage::parse_letters(&Stage::letters(all)), Ok(all.to_vec()));
        let other = "Top-N-Sigma;nucleus;typical-p;typ;adaptive-p;";
        let stages = [
            Stage::TopNSigma,
            Stage::TopP,
            Stage::TypicalP,
            Stage::TypicalP,
            Stage::AdaptiveP,
        ];
        assert_eq!(Stage::parse_list(other), Ok(stages.to_vec()));
        assert_eq!(Stage::parse_list(" ; "), Ok(vec![]));
        let message = Stage::parse_list("top_k;tipp").unwrap_err().to_string();
        assert!(
            message.contains("'tipp'") && message.contains("top_n_sigma"),
            "{message}"
        );
        let message = Stage::parse_letters("kZ").unwrap_err().to_string();
        assert!(
            message.contains("'Z'") && message.contains("edskypmxtia"),
            "{message}"
        );
    }
}
