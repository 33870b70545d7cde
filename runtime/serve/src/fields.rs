//! Reads the fields of a request. A wrong type or a value out of range is an error that names the
//! field.

use crate::error::{ApiError, Result};
use serde_json::{Map, Value, json};

/// An object of a request.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Path of the object in the request; empty for the request itself.
    place: String,
}

/// Returns the type of a value in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl<'a> Fields<'a> {
    pub fn new(value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(Fields {
                object,
                place: String::new(),
            }),
            other => Err(ApiError::invalid(format!(
                "the body must be a JSON object, and is {}",
                kind(other)
            ))),
        }
    }

    /// Returns the object at `place`.
    pub fn from_value(place: &str, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(object) => Ok(Fields {
                object,
                place: place.to_owned(),
            }),
            other => Err(ApiError::field(
                place,
                format!("must be an object, and is {}", kind(other)),
            )),
        }
    }

    /// Returns the path of a field.
    fn place(&self, name: &str) -> String {
        if self.place.is_empty() {
            name.to_owned()
        } else {
            format!("{}.{name}", self.place)
        }
    }

    fn wrong(&self, name: &str, what: impl std::fmt::Display) -> ApiError {
        ApiError::field(self.place(name), what)
    }

    pub fn object(&self) -> &'a Map<String, Value> {
        self.object
    }

    /// Returns the first of these names that has a value, and the value.
    pub fn get<'n>(&self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        let value = |name: &str| self.object.get(name).filter(|value| !value.is_null());
        names.iter().find_map(|&name| Some((name, value(name)?)))
    }

    /// Returns the value of a field, or null.
    pub fn value(&self, name: &str) -> &'a Value {
        self.get(&[name]).map_or(&Value::Null, |(_, value)| value)
    }

    pub fn has(&self, name: &str) -> bool {
        self.get(&[name]).is_some()
    }

    /// Reads the fields of these names, and returns the value of the first one that has any.
    fn first<T>(
        &self,
        names: &[&str],
        read: impl Fn(&str, &'a Value) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut first = None;
        for &name in names {
            if let Some((name, value)) = self.get(&[name]) {
                let value = read(name, value)?;
                first = first.or(Some(value));
            }
        }
        Ok(first)
    }

    pub fn boolean(&self, names: &[&str], default: bool) -> Result<bool> {
        let value = self.first(names, |name, value| match value {
            Value::Bool(value) => Ok(*value),
            other => Err(self.wrong(
                name,
                format!("must be true or false, and is {}", kind(other)),
            )),
        });
        Ok(value?.unwrap_or(default))
    }

    pub fn number(&self, names: &[&str], least: f64, most: f64) -> Result<Option<f64>> {
        self.first(names, |name, value| match value.as_f64() {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            Some(number) => Err(self.wrong(
                name,
                format!("must be from {least} to {most}, and is {number}"),
            )),
            None => Err(self.wrong(name, format!("must be a number, and is {}", kind(value)))),
        })
    }

    pub fn integer(&self, names: &[&str], least: i64, most: i64) -> Result<Option<i64>> {
        self.first(names, |name, value| {
            let wrong = |what: String| Err(self.wrong(name, what));
            let Value::Number(number) = value else {
                return wrong(format!("must be a whole number, and is {}", kind(value)));
            };
            let whole = number.as_f64().filter(|number| number.fract() == 0.0);
            let whole = number.as_i64().or(whole
                .filter(|number| number.abs() < 9e15)
                .map(|number| number as i64));
            match whole {
                Some(whole) if (least..=most).contains(&whole) => Ok(whole),
                _ => wrong(format!(
                    "must be a whole number from {least} to {most}, and is {number}"
                )),
            }
        })
    }

    pub fn count(&self, names: &[&str], most: usize) -> Result<Option<usize>> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let count = self.integer(names, 0, most)?;
        Ok(count.and_then(|count| usize::try_from(count).ok()))
    }

    /// Returns a seed of 64 bits; negative numbers are taken as two's complement. `None` if any
    /// seed will do.
    pub fn seed(&self, name: &str) -> Result<Option<u64>> {
        let Some((_, value)) = self.get(&[name]) else {
            return Ok(None);
        };
        let exact = match value {
            Value::Number(number) => number.as_u64().or(number.as_i64().map(i64::cast_unsigned)),
            _ => None,
        };
        let whole = value
            .as_f64()
            .filter(|number| number.fract() == 0.0 && number.abs() < 9e15);
        exact
            .or(whole.map(|number| (number as i64).cast_unsigned()))
            .map(Some)
            .ok_or_else(|| {
                let message = match value {
                    Value::Number(number) => {
                        format!("must be a whole number of 64 bits, and is {number}")
                    }
                    other => format!("must be a whole number, and is {}", kind(other)),
                };
                self.wrong(name, message)
            })
    }

    pub fn text(&self, names: &[&str]) -> Result<Option<&'a str>> {
        self.first(names, |name, value| match value {
            Value::String(text) => Ok(text.as_str()),
            other => Err(self.wrong(name, format!("must be a string, and is {}", kind(other)))),
        })
    }

    pub fn required_text(&self, name: &str) -> Result<&'a str> {
        let text = self.text(&[name])?;
        text.ok_or_else(|| self.wrong(name, "is missing"))
    }

    pub fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.get(&[name]) {
            None => Ok(None),
            Some((_, Value::Array(list))) => Ok(Some(list)),
            Some((_, other)) => {
                Err(self.wrong(name, format!("must be a list, and is {}", kind(other))))
            }
        }
    }

    /// Returns a list of strings. A single string counts as a list.
    pub fn texts(&self, name: &str, most: usize) -> Result<Vec<String>> {
        let list = match self.get(&[name]) {
            None => return Ok(Vec::new()),
            Some((_, Value::String(text))) => return Ok(vec![text.clone()]),
            Some(_) => self.list(name)?.unwrap_or_default(),
        };
        if list.len() > most {
            return Err(self.wrong(name, format!("{} entries; {most} are allowed", list.len())));
        }
        let texts = list.iter().enumerate().map(|(i, text)| match text {
            Value::String(text) => Ok(text.clone()),
            other => Err(self.wrong(
                &format!("{name}[{i}]"),
                format!("must be a string, and is {}", kind(other)),
            )),
        });
        texts.collect()
    }

    pub fn fields(&self, name: &str) -> Result<Option<Fields<'a>>> {
        match self.get(&[name]) {
            None => Ok(None),
            Some((name, value)) => Fields::from_value(&self.place(name), value).map(Some),
        }
    }
}

/// Size of a JSON body, determined before it is parsed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// Nesting depth of brackets.
    pub depth: usize,
    /// Maximum number of values in it.
    pub values: usize,
    pub objects: usize,
}

impl Extent {
    /// Computes the size from the characters outside strings.
    pub fn measure(body: &[u8]) -> Self {
        let mut extent = Extent {
            values: 1,
            ..Extent::default()
        };
        let mut depth = 0usize;
        let (mut is_text, mut is_escaped) = (false, false);
        for &byte in body {
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_text => is_escaped = true,
                b'"' => is_text = !is_text,
                b'{' | b'[' if !is_text => {
                    depth += 1;
                    extent.depth = extent.depth.max(depth);
                    extent.values += 1;
                    extent.objects += usize::from(byte == b'{');
                }
                b'}' | b']' if !is_text => depth = depth.saturating_sub(1),
                b',' if !is_text => extent.values += 1,
                _ => {}
            }
        }
        extent
    }
}

/// Returns the number of bytes of a value as JSON.
pub fn json_len(value: &Value) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // Nothing fails to be counted.
    let _ = serde_json::to_writer(&mut count, value);
    count.0
}

/// An API's format of a text as a list of items.
pub struct TextItems {
    /// Noun for the items in messages.
    pub words: &'static str,
    /// Types with text. The first is the default.
    pub texts: &'static [&'static str],
    /// Type of an image.
    pub image: &'static str,
    /// Reads the URL of an image, if it has one.
    pub image_url: fn(&Fields<'_>) -> Result<Option<String>>,
    /// Members that may hold the text.
    pub members: &'static [&'static str],
}

impl TextItems {
    /// Reads a text, or the texts of a list. Anything else is an error.
    pub fn read(&self, place: &str, value: &Value) -> Result<String> {
        let parts = self.parts(place, value, |_, _| None)?;
        let mut texts = Vec::with_capacity(parts.len());
        for part in parts {
            match part {
                TextPart::Text(text) => texts.push(text),
                TextPart::Image { place, .. } => {
                    let message =
                        "images are not supported here: put them in a message of the user";
                    return Err(ApiError::field(place, message));
                }
            }
        }
        Ok(texts.join("\n"))
    }

    /// Reads a text, or texts and images. Returns the content of a message in OpenAI's format: a
    /// text, or a list if there are images. `other` returns the texts of items of other types.
    pub fn read_content(
        &self,
        place: &str,
        value: &Value,
        other: impl FnMut(&str, &Fields<'_>) -> Option<String>,
    ) -> Result<Value> {
        let parts = self.parts(place, value, other)?;
        let texts: Option<Vec<&str>> = parts.iter().map(TextPart::text).collect();
        if let Some(texts) = texts {
            return Ok(texts.join("\n").into());
        }
        Ok(parts.into_iter().map(TextPart::into_value).collect())
    }

    fn parts(
        &self,
        place: &str,
        value: &Value,
        mut other: impl FnMut(&str, &Fields<'_>) -> Option<String>,
    ) -> Result<Vec<TextPart>> {
        let words = self.words;
        let items = match value {
            Value::Null => return Ok(Vec::new()),
            Value::String(text) => return Ok(vec![TextPart::Text(text.clone())]),
            Value::Array(items) => items,
            other => {
                let message = format!(
                    "must be a string or a list of {words}, and is {}",
                    kind(other)
                );
                return Err(ApiError::field(place, message));
            }
        };
        let mut parts = Vec::new();
        for (i, item) in items.iter().enumerate() {
            let place = format!("{place}[{i}]");
            let item = Fields::from_value(&place, item)?;
            let kind = item.text(&["type"])?.unwrap_or(self.texts[0]);
            if self.texts.contains(&kind) {
                let text = item.text(self.members)?;
                parts.push(TextPart::Text(text.unwrap_or_default().to_owned()));
            } else if let Some(text) = other(kind, &item) {
                parts.push(TextPart::Text(text));
            } else if kind == self.image {
                let url = (self.image_url)(&item)?.unwrap_or_default();
                parts.push(TextPart::Image { place, url });
            } else {
                let message = format!("{words} of type \"{kind}\" are not supported here");
                return Err(ApiError::field(place, message));
            }
        }
        Ok(parts)
    }
}

/// Name of a member of translated images: their field in the client's request, for errors.
pub const PLACE: &str = "samite_place";

/// Returns an image in OpenAI's format. `place` is its field in the client's request.
pub fn image_part(url: &str, place: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}, PLACE: place})
}

/// A part of a text with images.
enum TextPart {
    Text(String),
    Image { place: String, url: String },
}

impl TextPart {
    fn text(&self) -> Option<&str> {
        match self {
            TextPart::Text(text) => Some(text),
            TextPart::Image { .. } => None,
        }
    }

    /// Returns the part in OpenAI's format.
    fn into_value(self) -> Value {
        match self {
            TextPart::Text(text) => json!({"type": "text", "text": text}),
            TextPart::Image { place, url } => image_part(&url, &place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_fields_are_named() {
        let body = json!({"a": 1.5, "b": "x", "c": [1], "d": null, "n": 3.0});
        let fields = Fields::new(&body).unwrap();
        let message = |error: ApiError| error.message;
        assert_eq!(fields.integer(&["n"], 0, 5), Ok(Some(3)));
        assert_eq!(fields.integer(&["d"], 0, 5), Ok(None));
        // The next name counts if one has no value.
        assert_eq!(fields.integer(&["d", "n"], 0, 5), Ok(Some(3)));
        assert!(
            message(fields.integer(&["a"], 0, 5).unwrap_err())
                .starts_with("\"a\": must be a whole")
        );
        assert!(message(fields.integer(&["n"], 0, 2).unwrap_err()).contains("from 0 to 2"));
        assert!(message(fields.boolean(&["b"], true).unwrap_err()).contains("is a string"));
        assert!(message(fields.texts("c", 4).unwrap_err()).starts_with("\"c[0]\""));
        assert_eq!(fields.texts("b", 4), Ok(vec!["x".to_owned()]));
        assert_eq!(fields.number(&["z", "a"], 0.0, 2.0), Ok(Some(1.5)));
        // A value of another name must be right even if it does not count.
        assert!(message(fields.integer(&["n", "a"], 0, 5).unwrap_err()).starts_with("\"a\""));
    }

    #[test]
    fn extents_ignore_brackets_in_strings() {
        let extent = Extent::measure(br#"{"a": [1, {"b": "[[[\"{,["}]}"#);
        assert_eq!((extent.depth, extent.values, extent.objects), (3, 5, 2));
        assert_eq!(Extent::measure(&[b'['; 100]).depth, 100);
    }

    #[test]
    fn seeds_have_64_bits() {
        let seed = |value: Value| Fields::new(&json!({"seed": value})).unwrap().seed("seed");
        assert_eq!(seed(json!(null)), Ok(None));
        assert_eq!(seed(json!(u64::MAX)), Ok(Some(u64::MAX)));
        assert_eq!(seed(json!(-1)), Ok(Some(u64::MAX)));
        assert_eq!(seed(json!(5_000_000_000_u64)), Ok(Some(5_000_000_000)));
        assert_eq!(seed(json!(3.0)), Ok(Some(3)));
        for value in [json!(1.5), json!(1e30), json!("1"), json!([])] {
            assert!(
                seed(value.clone())
                    .unwrap_err()
                    .message
                    .starts_with("\"seed\""),
                "{value}"
            );
        }
    }
}
