//! Matrix products on any CBLAS library found at run time.
