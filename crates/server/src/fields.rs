//! Reading the JSON of a request: every member is asked for by name, and what nobody asked for is
//! refused by name.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::error::{ApiError, Result};

/// The members of a JSON object that were not read yet, and where the object stands in the request.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    at: String,
    members: BTreeMap<String, &'a RawValue>,
}

impl<'a> Fields<'a> {
    /// Reads the body of a request. Duplicate members, deep nesting and text that no Unicode string can
    /// be are refused at any depth.
    pub fn body(bytes: &'a [u8]) -> Result<Self> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let at = error.valid_up_to();
            ApiError::invalid(format!("body: expected UTF-8, found an invalid byte at {at}"))
        })?;
        Self::read(text::json::strict(text)?, String::new())
    }

    /// Reads an object that stands at `at`.
    pub fn read(value: &'a RawValue, at: String) -> Result<Self> {
        let members = serde_json::from_str(value.get());
        let place = if at.is_empty() { "body" } else { &at };
        let members = members.map_err(|_| ApiError::field(place, "an object", kind(value)))?;
        Ok(Fields { at, members })
    }

    /// The path of a member, such as `tools[0].name`.
    pub fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    /// Takes a member that is neither missing nor null.
    pub fn take(&mut self, name: &str) -> Option<&'a RawValue> {
        self.members.remove(name).filter(|value| value.get() != "null")
    }

    /// Looks at a member that is neither missing nor null, without taking it.
    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.members.get(name).copied().filter(|value| value.get() != "null")
    }

    /// Takes a member that must be there.
    pub fn require(&mut self, name: &str) -> Result<&'a RawValue> {
        self.take(name).ok_or_else(|| ApiError::field(&self.path(name), "a value", "nothing"))
    }

    /// Takes an object.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields<'a>>> {
        let path = self.path(name);
        self.take(name).map(|value| Fields::read(value, path)).transpose()
    }

    /// Takes an array: its elements and where they stand, none if it is missing.
    pub fn array(
        &mut self,
        name: &str,
    ) -> Result<impl Iterator<Item = (String, &'a RawValue)> + use<'a>> {
        let path = self.path(name);
        let elements = self.take(name).map(|value| elements(value, &path)).transpose()?;
        Ok(elements.into_iter().flatten())
    }

    /// Takes a string.
    pub fn string(&mut self, name: &str) -> Result<Option<String>> {
        let path = self.path(name);
        self.take(name).map(|value| parse(value, &path, "a string")).transpose()
    }

    /// Takes a boolean.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>> {
        let path = self.path(name);
        self.take(name).map(|value| parse(value, &path, "a boolean")).transpose()
    }

    /// Takes a number.
    pub fn number(&mut self, name: &str) -> Result<Option<f32>> {
        let path = self.path(name);
        let number = |value| {
            let number = parse::<f64>(value, &path, "a finite number")? as f32;
            let finite = Some(number).filter(|number| number.is_finite());
            finite.ok_or_else(|| ApiError::field(&path, "a finite number", kind(value)))
        };
        self.take(name).map(number).transpose()
    }

    /// Takes a whole number, at least `least`; one that is larger than memory counts as infinite.
    pub fn whole(&mut self, name: &str, least: usize) -> Result<Option<usize>> {
        let path = self.path(name);
        let expected = format!("a whole number, at least {least}");
        let whole = |value: &'a RawValue| {
            let number: f64 = parse(value, &path, &expected)?;
            if number.fract() != 0.0 || number < least as f64 {
                return Err(ApiError::field(&path, &expected, value.get()));
            }
            Ok(number as usize)
        };
        self.take(name).map(whole).transpose()
    }

    /// Takes a value of any kind.
    pub fn value(&mut self, name: &str) -> Result<Option<Value>> {
        let path = self.path(name);
        self.take(name).map(|value| parse(value, &path, "a JSON value")).transpose()
    }

    /// Drops members that change nothing about the answer.
    pub fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|&name| {
            self.members.remove(name);
        });
    }

    /// Refuses what was not taken: it might have changed the answer.
    pub fn finish(self) -> Result<()> {
        let left = self.members.iter().find(|(_, value)| value.get() != "null");
        match left.map(|(name, _)| self.path(name)) {
            None => Ok(()),
            Some(name) => Err(ApiError {
                code: Some("unsupported_parameter"),
                ..ApiError::about(&name, "this field is not supported here")
            }),
        }
    }
}

/// The elements of an array and where they stand, which is written one by one: an array of millions is refused
/// with its first element.
pub fn elements<'a>(
    value: &'a RawValue,
    at: &str,
) -> Result<impl ExactSizeIterator<Item = (String, &'a RawValue)> + use<'a>> {
    let elements: Vec<&RawValue> = parse(value, at, "an array")?;
    let at = at.to_owned();
    Ok(elements.into_iter().enumerate().map(move |(i, element)| (format!("{at}[{i}]"), element)))
}

/// Reads a value that stands at `at`.
pub fn parse<'a, T>(value: &'a RawValue, at: &str, expected: &str) -> Result<T>
where
    T: serde_core::Deserialize<'a>,
{
    serde_json::from_str(value.get()).map_err(|_| ApiError::field(at, expected, kind(value)))
}

/// Reads an array of token ids that stands at `at`.
pub fn token_ids(value: &RawValue, at: &str) -> Result<Vec<u32>> {
    serde_json::from_str(value.get())
        .or_else(|_| elements(value, at)?.map(|(at, id)| parse(id, &at, "a token id")).collect())
}

/// A text, or the texts of an array of parts whose type is one of `kinds`, joined.
pub fn text_of(value: &RawValue, at: &str, kinds: &[&str], expected: &str) -> Result<String> {
    if is_string(value) {
        return parse(value, at, "a text");
    }
    let mut text = String::new();
    for (at, value) in elements(value, at)? {
        let mut part = Fields::read(value, at)?;
        let path = part.path("type");
        let kind = part.string("type")?.unwrap_or_default();
        if !kinds.contains(&&*kind) {
            return Err(ApiError::field(&path, expected, format!("{kind:?}")));
        }
        let path = part.path("text");
        let more: String = parse(part.require("text")?, &path, "a text")?;
        text.push_str(&more);
        part.ignore(TEXT_MARKS);
        part.finish()?;
    }
    Ok(text)
}

/// Members of a text that mean nothing to the answer: what an earlier answer had beside it, and marks of caches.
pub const TEXT_MARKS: &[&str] = &["annotations", "logprobs", "citations", "cache_control"];

/// Whether a value is a string.
pub fn is_string(value: &RawValue) -> bool {
    value.get().starts_with('"')
}

/// What a value is, for messages: numbers as they are, of the others the kind.
pub fn kind(value: &RawValue) -> &str {
    match value.get().bytes().next() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => value.get(),
    }
}
