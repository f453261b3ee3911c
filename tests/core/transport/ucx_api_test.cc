// SPDX-License-Identifier: Apache-2.0
// What ucx_api.h says of UCX's ABI, against UCX's own headers where they are installed.
#include "core/transport/ucx_api.h"

#include <gtest/gtest.h>

#if __has_include(<ucp/api/ucp.h>)
#include <ucp/api/ucp.h>
#define DFCCL_UCX_HEADERS 1
#endif

namespace dfccl {
namespace {

TEST(UcxApiTest, IsThatOfItsHeaders) {
#if defined(DFCCL_UCX_HEADERS)
#define DFCCL_SAME_PLACE(ours, our_field, theirs, their_field)                \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))
  DFCCL_SAME_PLACE(UcxParameters, features, ucp_params_t, features);
  DFCCL_SAME_PLACE(UcxParameters, workers_shared, ucp_params_t, mt_workers_shared);
  DFCCL_SAME_PLACE(UcxWorkerParameters, thread_mode, ucp_worker_params_t, thread_mode);
  DFCCL_SAME_PLACE(UcxWorkerParameters, events, ucp_worker_params_t, events);
  DFCCL_SAME_PLACE(UcxEndpointParameters, address, ucp_ep_params_t, address);
  DFCCL_SAME_PLACE(UcxEndpointParameters, error_mode, ucp_ep_params_t, err_mode);
  DFCCL_SAME_PLACE(UcxEndpointParameters, error_handler, ucp_ep_params_t, err_handler);
  DFCCL_SAME_PLACE(UcxEndpointParameters, user_data, ucp_ep_params_t, user_data);
  DFCCL_SAME_PLACE(UcxRequestParameters, mask, ucp_request_param_t, op_attr_mask);
  DFCCL_SAME_PLACE(UcxRequestParameters, flags, ucp_request_param_t, flags);
  DFCCL_SAME_PLACE(UcxRequestParameters, callback, ucp_request_param_t, cb);
  DFCCL_SAME_PLACE(UcxRequestParameters, user_data, ucp_request_param_t, user_data);
  DFCCL_SAME_PLACE(UcxArrival, attributes, ucp_am_recv_param_t, recv_attr);
  DFCCL_SAME_PLACE(UcxMessageHandler, id, ucp_am_handler_param_t, id);
  DFCCL_SAME_PLACE(UcxMessageHandler, flags, ucp_am_handler_param_t, flags);
  DFCCL_SAME_PLACE(UcxMessageHandler, callback, ucp_am_handler_param_t, cb);
  DFCCL_SAME_PLACE(UcxMessageHandler, argument, ucp_am_handler_param_t, arg);
#undef DFCCL_SAME_PLACE
  EXPECT_EQ(sizeof(UcxStatus), sizeof(ucs_status_t));
  EXPECT_EQ(kUcxOk, UCS_OK);
  EXPECT_EQ(kUcxInProgress, UCS_INPROGRESS);
  EXPECT_EQ(UcxParameters::kFeatures, UCP_PARAM_FIELD_FEATURES);
  EXPECT_EQ(UcxParameters::kWorkersShared, UCP_PARAM_FIELD_MT_WORKERS_SHARED);
  EXPECT_EQ(UcxParameters::kWakeup, UCP_FEATURE_WAKEUP);
  EXPECT_EQ(UcxParameters::kActiveMessages, UCP_FEATURE_AM);
  EXPECT_EQ(UcxWorkerParameters::kThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
  EXPECT_EQ(UcxWorkerParameters::kSerialized, UCS_THREAD_MODE_SERIALIZED);
  EXPECT_EQ(UcxEndpointParameters::kAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
  EXPECT_EQ(UcxEndpointParameters::kErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
  EXPECT_EQ(UcxEndpointParameters::kErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
  EXPECT_EQ(UcxEndpointParameters::kPeer, UCP_ERR_HANDLING_MODE_PEER);
  EXPECT_EQ(UcxRequestParameters::kCallback, UCP_OP_ATTR_FIELD_CALLBACK);
  EXPECT_EQ(UcxRequestParameters::kUserData, UCP_OP_ATTR_FIELD_USER_DATA);
  EXPECT_EQ(UcxRequestParameters::kFlags, UCP_OP_ATTR_FIELD_FLAGS);
  EXPECT_EQ(UcxRequestParameters::kEager, UCP_AM_SEND_FLAG_EAGER);
  EXPECT_EQ(UcxRequestParameters::kForceClose, UCP_EP_CLOSE_FLAG_FORCE);
  EXPECT_EQ(UcxArrival::kKeepable, UCP_AM_RECV_ATTR_FLAG_DATA);
  EXPECT_EQ(UcxArrival::kRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);
  EXPECT_EQ(UcxMessageHandler::kId, UCP_AM_HANDLER_PARAM_FIELD_ID);
  EXPECT_EQ(UcxMessageHandler::kFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
  EXPECT_EQ(UcxMessageHandler::kCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
  EXPECT_EQ(UcxMessageHandler::kArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);
  EXPECT_EQ(UcxMessageHandler::kWholeMessage, UCP_AM_FLAG_WHOLE_MSG);
  for (intptr_t value : {0, 1, -1, -99, -100, -101, 4096}) {
    void* const result = reinterpret_cast<void*>(value);
    EXPECT_EQ(IsUcxRequest(result), UCS_PTR_IS_PTR(result)) << value;
    EXPECT_EQ(IsUcxError(result), UCS_PTR_IS_ERR(result)) << value;
  }
#else
  GTEST_SKIP() << "UCX's headers (Debian's libucx-dev) are not installed";
#endif
}

TEST(UcxApiTest, WhatCannotBeLoadedIsNamed) {
  Status status;
  EXPECT_EQ(LoadUcx({"libucp.so.999", "libc.so.6"}, &status), nullptr);
  EXPECT_EQ(status.message(),
            "UCX cannot be used: libc.so.6 is too old: it has no ucp_get_version");
  EXPECT_EQ(LoadUcx({"libucp.so.999"}, &status), nullptr);
  EXPECT_EQ(status.message().find("UCX cannot be used: libucp.so.999: "), 0u) << status.message();
}

}  // namespace
}  // namespace dfccl
