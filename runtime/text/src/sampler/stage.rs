//! The stages of a chain, by name.

use super::error::SamplerError;
use std::fmt;

/// One stage of a sampler chain. Its parameters are in [`SamplerParams`](crate::SamplerParams).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Penalizes recent tokens.
    Penalties,
    /// Penalizes tokens that would continue a repetition.
    Dry,
    /// Keeps tokens close to the best logit, in standard deviations.
    TopNSigma,
    /// Keeps the k most probable tokens.
    TopK,
    /// Keeps tokens whose surprise is close to the expected one.
    TypicalP,
    /// Keeps the most probable tokens that together reach a probability.
    TopP,
    /// Keeps tokens with a minimum fraction of the highest probability.
    MinP,
    /// Sometimes removes the most probable tokens.
    Xtc,
    /// Divides the logits.
    Temperature,
    /// Keeps tokens that fit into a gap in a text.
    Infill,
    /// Draws close to a target probability. It replaces the draw, so its position does not matter.
    AdaptiveP,
}

impl Stage {
    /// llama.cpp's order.
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

    /// All stages with their letters and names. The first name is used for output.
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

    /// Returns the name in lists.
    pub fn name(self) -> &'static str {
        self.entry().2[0]
    }

    /// Returns the letter in sequences.
    pub fn letter(self) -> char {
        self.entry().1
    }

    fn entry(self) -> (Self, char, &'static [&'static str]) {
        Self::TABLE[self as usize]
    }

    /// Parses names separated by `;`, such as `top_k;temperature`. An empty text has no stages.
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
    /// Returns [`SamplerError::UnknownStage`] if a name is unknown.
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

    /// Parses letters, such as `kt`.
    ///
    /// # Errors
    /// Returns [`SamplerError::UnknownStage`] if a letter is unknown.
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

    /// Returns the names, separated by `;`.
    pub fn list(stages: impl IntoIterator<Item = Self>) -> String {
        let names: Vec<_> = stages.into_iter().map(Self::name).collect();
        names.join(";")
    }

    /// Returns the letters.
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
    fn the_stage_table_is_in_stage_order() {
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
    fn stage_names_and_letters_round_trip() {
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
