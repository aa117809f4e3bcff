//! An answer that refuses a request.

use std::fmt;

/// Refuses a request: which field is wrong, in what way, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denial {
    /// Path of the field: `spec.containers[0].resources.limits[nvidia.com/mig-1g.10gb]`.
    pub field: String,
    /// What is wrong and what would be right.
    pub message: String,
    /// HTTP status of the answer: 422 for a bad field, 503 for "not yet".
    pub code: u16,
}

impl Denial {
    /// The field's value can never be served.
    pub(super) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into(), code: 422 }
    }

    /// The same request may succeed a moment later.
    pub(super) fn not_yet(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: field.into(), message: message.into(), code: 503 }
    }
}

impl fmt::Display for Denial {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for Denial {}
