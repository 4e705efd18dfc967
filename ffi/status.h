// Success, or a message for the user. The library reports every failure through this type; the
// handlers turn it into an XLA status. Independent of XLA, so that the emulator can use it too.

#ifndef FA4_JAX_FFI_STATUS_H_
#define FA4_JAX_FFI_STATUS_H_

#include <optional>
#include <string>
#include <utility>

namespace fa4_jax {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  static Status Error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    return status;
  }
  bool ok() const { return !message_.has_value(); }
  const std::string& message() const { return *message_; }  // only when !ok()

 private:
  std::optional<std::string> message_;
};

// Returns from the enclosing function when `expression` is not ok. The enclosing function returns
// Status or a type that Status converts to.
#define FA4_JAX_RETURN_IF_ERROR(expression)                             \
  do {                                                                  \
    if (::fa4_jax::Status status_ = (expression); !status_.ok()) {      \
      return status_;                                                   \
    }                                                                   \
  } while (false)

}  // namespace fa4_jax

#endif  // FA4_JAX_FFI_STATUS_H_
