"""The daemon's requests and responses, and the OpenAPI document made from them."""
