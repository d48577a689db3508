//! JSON of untrusted origin.

use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use model::{Error, Result};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};

/// Reads a whole JSON file.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = std::fs::read(path).map_err(|error| Error::Io(error).in_file(path))?;
    parse(&text).map_err(|error| error.in_file(path))
}

/// Parses a whole JSON text.
pub(crate) fn parse<T: DeserializeOwned>(text: &[u8]) -> Result<T> {
    serde_json::from_slice(text)
        .map_err(|error| Error::mismatch("JSON", "the published form", error))
}

/// An object in its own order. A repeated key is refused: which of the two counts would depend on
/// the reader.
#[derive(Debug)]
pub(crate) struct Object<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Object<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs<V>(PhantomData<V>);

        impl<'de, V: Deserialize<'de>> Visitor<'de> for Pairs<V> {
            type Value = Object<V>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Self::Value, A::Error> {
                let (mut pairs, mut seen) = (Vec::new(), std::collections::HashSet::new());
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    if !seen.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format!("`{key}` occurs twice")));
                    }
                    pairs.push((key, value));
                }
                Ok(Object(pairs))
            }
        }

        deserializer.deserialize_map(Pairs(PhantomData))
    }
}
